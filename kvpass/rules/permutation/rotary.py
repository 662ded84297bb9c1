"""Permutations of channels, and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import same_shape
from kvpass.graph.orders import permuted
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import VIEWS, argument, op_name
from kvpass.rules.permutation.base import Moved, changed_miss, operands, shape_of
from kvpass.rules.permutation.views import joins_last, last_slice


@dataclass(frozen=True)
class Rotation:
    """``x * cos + rotated * sin``.

    Attributes:
        x, cos, sin: its inputs.
        inner: both products, and the nodes between ``x`` and ``rotated``.
        kind: see `kvpass.format.rope.Rope`.
    """

    x: Node
    cos: Node
    sin: Node
    inner: tuple[Node, ...]
    kind: Literal["halves", "neighbours"]


# P(x * cos + rotate(x) * sin) = P(x) * P(cos) + rotate(P(x)) * P(sin)
#
# where rotate(x) is cat(-x[D/2:], x[:D/2]) and P keeps the pairs (i, i + D/2) and their order, or
# rotate(x) makes (-b, a) of the neighbours (a, b), and P keeps the pairs (2i, 2i + 1) and theirs.
def rotary_up(x: Node, index: Tensor) -> Moved:
    """Moves through a rotary embedding; its cosines and sines get the order of the pairs."""
    if (found := rotation(x)) is None:
        return None
    keeps = keeps_halves if found.kind == "halves" else keeps_neighbours
    if not keeps(index):
        return Miss("the order does not keep the pairs of the rotary embedding", x)
    tables, inner = (found.cos, found.sin), found.inner
    for node in inner:
        for user in node.users:
            if user is not x and user not in inner:
                return Miss(f"{node.name} is read by {op_name(user)} as well", user)
    if miss := changed_miss(found.x, *tables, *inner):
        return miss
    if any(len(shape_of(t)) != index.dim() for t in (found.x, *tables)):
        return Miss("cosines and sines have other dimensions than what they rotate", x)
    if any(shape_of(t)[-1] != index.shape[-1] for t in tables):
        return Miss("cosines and sines have other channels than what they rotate", x)
    moved = permuted(found.x, index)
    for node in inner:
        node.replace_input_with(found.x, moved)
    for product, table in zip(inner[:2], tables, strict=True):
        product.replace_input_with(table, permuted(table, index, "stays"))
    return [] if moved is found.x else [moved]


def rotations(x: Node) -> list[tuple[int, int, bool]]:
    """The channels of ``x`` ``[..., D]`` that rotary embeddings rotate: start, stop, and whether
    their pairs are halves."""
    if (found := rotation(x)) is not None:
        return [(0, int(shape_of(x)[-1]), found.kind == "halves")]
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


def rotation(x: Node) -> Rotation | None:
    """The rotary embedding that ``x`` is the result of, if any."""
    if op_name(x) != "add":
        return None
    for by_cos, by_sin in (operands(x), operands(x)[::-1]):
        if op_name(by_cos) != "mul" or op_name(by_sin) != "mul":
            continue
        for rotated, sin in (operands(by_sin), operands(by_sin)[::-1]):
            found = _rotated(rotated)
            if found is None or not isinstance(sin, Node):
                continue
            source, between, kind = found
            factors = [f for f in operands(by_cos) if f is not source]
            if len(factors) == 1 and isinstance(factors[0], Node):
                return Rotation(source, factors[0], sin, (by_cos, by_sin, *between), kind)
    return None


def _rotated(node: Any) -> tuple[Node, tuple[Node, ...], Literal["halves", "neighbours"]] | None:
    """``x``, what lies between, and the kind of its pairs, if ``node`` is ``rotate(x)``."""
    kind: Literal["halves", "neighbours"] = "halves" if op_name(node) == "cat" else "neighbours"
    joined = node.args[0] if op_name(node) == "reshape" else node
    if op_name(joined) not in ("cat", "stack") or not joins_last(joined):
        return None
    tensors: Any = argument(joined, "tensors")
    if len(tensors) != 2 or op_name(tensors[0]) != "neg":
        return None
    negated, first = tensors
    second = argument(negated, "input")
    parts = [last_slice(n) for n in (first, second)]
    if None in parts or first.args[0] is not second.args[0]:
        return None
    source: Node = first.args[0]
    channels = torch.arange(int(shape_of(source)[-1]))
    if len(channels) % 2 or not same_shape(shape_of(node), shape_of(source)):
        return None
    expected = channels.view(2, -1) if kind == "halves" else channels.view(-1, 2).T
    if [list(part or ()) for part in parts] != expected.tolist():
        return None
    return source, tuple(dict.fromkeys((node, joined, negated, first, second))), kind
