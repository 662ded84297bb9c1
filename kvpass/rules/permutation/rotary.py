"""Permutations of channels, and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import same_shape
from kvpass.graph.analysis.reads import VIEWS
from kvpass.graph.orders import permuted
from kvpass.graph.pattern import Miss, argument, op_name
from kvpass.rules.permutation.base import (
    Moved,
    PushUp,
    alone,
    changed_miss,
    is_last,
    operands,
    shape_of,
)
from kvpass.rules.permutation.views import last_slice


@dataclass(frozen=True)
class Rotation:
    """``x * cos + rotated * sin``; ``inner`` are the nodes between ``x`` and ``rotated``."""

    x: Node
    cos: Node
    sin: Node
    by_cos: Node
    by_sin: Node
    inner: tuple[Node, ...]


# P(x * cos + turn(x) * sin) = P(x) * P(cos) + turn(P(x)) * P(sin)
#
# where turn(x) is cat(-x[D/2:], x[:D/2]) and P keeps the pairs (i, i + D/2) and their order, or
# turn(x) makes (-b, a) of the neighbours (a, b), and P keeps the pairs (2i, 2i + 1) and theirs.
class Rotary(PushUp):
    """Through a rotary embedding, whose cosines and sines are permuted by the pairs' order."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        found = rotation(x)
        if found is None:
            return None
        turn, halves = found
        if not (keeps_halves(index) if halves else keeps_neighbours(index)):
            return Miss("the order does not keep the pairs of the rotary embedding", x)
        between = (turn.by_cos, turn.by_sin, *turn.inner)
        tables = (turn.cos, turn.sin)
        if miss := alone(between, (x, *between)):
            return miss
        if miss := changed_miss(turn.x, *tables, *between):
            return miss
        if any(len(shape_of(t)) != index.dim() for t in (turn.x, *tables)):
            return Miss("cosines and sines have other dimensions than what they rotate", x)
        if any(shape_of(t)[-1] != index.shape[-1] for t in tables):
            return Miss("cosines and sines have other channels than what they rotate", x)
        moved = permuted(turn.x, index)
        for node in between:
            node.replace_input_with(turn.x, moved)
        for node, table in zip(between[:2], tables, strict=True):
            node.replace_input_with(table, permuted(table, index, "stays"))
        return [] if moved is turn.x else [moved]


def rotations(x: Node) -> list[tuple[int, int, bool]]:
    """The channels of ``x`` ``[..., D]`` that rotary embeddings turn: start, stop, and whether
    their pairs are halves."""
    if (found := rotation(x)) is not None:
        return [(0, int(shape_of(x)[-1]), found[1])]
    if op_name(x) == "cat" and joins_last(x):
        parts, start = [], 0
        for tensor in argument(x, "tensors"):
            parts += [(start + i, start + j, halves) for i, j, halves in rotations(tensor)]
            start += int(shape_of(tensor)[-1])
        return parts
    source = x.all_input_nodes[0] if op_name(x) in VIEWS else None
    if source is None or not isinstance(source.meta["example_value"], Tensor):
        return []
    # As long as the number of channels stays, so do they.
    return rotations(source) if shape_of(source)[-1] == shape_of(x)[-1] else []


def keeps_halves(index: Tensor) -> bool:
    """Whether channels ``i`` and ``i + D/2`` become ``j`` and ``j + D/2``."""
    half = index.shape[-1] // 2
    first, second = index[..., :half], index[..., half:]
    return index.shape[-1] % 2 == 0 and bool(
        (first < half).all() and (second == first + half).all()
    )


def keeps_neighbours(index: Tensor) -> bool:
    """Whether channels ``2i`` and ``2i + 1`` become ``2j`` and ``2j + 1``."""
    if index.shape[-1] % 2:
        return False
    first, second = index[..., 0::2], index[..., 1::2]
    return bool((first % 2 == 0).all() and (second == first + 1).all())


def rotation(x: Node) -> tuple[Rotation, bool] | None:
    """The rotation that ``x`` is, and whether its pairs are halves."""
    if op_name(x) != "add":
        return None
    for by_cos, by_sin in (operands(x), operands(x)[::-1]):
        if op_name(by_cos) != "mul" or op_name(by_sin) != "mul":
            continue
        for rotated, sin in (operands(by_sin), operands(by_sin)[::-1]):
            found = _rotated(rotated)
            if found is None or not isinstance(sin, Node):
                continue
            source, inner, halves = found
            factors = [f for f in operands(by_cos) if f is not source]
            if len(factors) == 1 and isinstance(factors[0], Node):
                return Rotation(source, factors[0], sin, by_cos, by_sin, inner), halves
    return None


def _rotated(node: Any) -> tuple[Node, tuple[Node, ...], bool] | None:
    """``x``, what lies between, and whether halves are rotated, if ``node`` is ``turn(x)``."""
    halves = op_name(node) == "cat"
    joined = node if halves or op_name(node) != "reshape" else node.args[0]
    if op_name(joined) not in ("cat", "stack") or not joins_last(joined):
        return None
    tensors: Any = argument(joined, "tensors")
    if len(tensors) != 2 or op_name(tensors[0]) != "neg":
        return None
    negated, first = tensors
    second = argument(negated, "input")
    parts = [last_slice(n) for n in (first, second) if isinstance(n, Node)]
    if len(parts) != 2 or None in parts or first.args[0] is not second.args[0]:
        return None
    source: Node = first.args[0]
    channels = torch.arange(int(shape_of(source)[-1]))
    if len(channels) % 2 or not same_shape(shape_of(node), shape_of(source)):
        return None
    expected = channels.view(2, -1) if halves else channels.view(-1, 2).T
    places = [torch.tensor(list(p or ()), dtype=torch.int64) for p in parts]
    if not all(map(torch.equal, places, expected)):
        return None
    between = dict.fromkeys((node, joined, negated, first, second))
    return source, tuple(between), halves


def joins_last(node: Node) -> bool:
    """Whether ``node`` joins its tensors along the last dimension of its result."""
    dim = argument(node, "dim")
    return isinstance(dim, int) and is_last(dim, node)
