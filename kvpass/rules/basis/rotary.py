"""Bases of channels, and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch_sizes import same_shape
from kvpass.graph.bases import blocks, channels, in_basis, is_rotation, rank
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import VIEWS, argument, op_name
from kvpass.rules.basis.base import Moved, changed_miss, operands, shape_of
from kvpass.rules.basis.views import joins_last, last_slice


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
#
# R(x * cos + rotate(x) * sin) = R(x) * cos + rotate(R(x)) * sin
#
# where R turns each pair, as the embedding does: two turns of a plane commute.
def rotary_up(x: Node, basis: Tensor) -> Moved:
    """Moves through a rotary embedding; its cosines and sines get the order of the pairs."""
    if (found := rotation(x)) is None:
        return None
    if is_rotation(basis):
        if not turns_pairs(basis, found.kind):
            return Miss("the rotation mixes pairs of the rotary embedding", x)
    elif not (keeps_halves if found.kind == "halves" else keeps_neighbours)(basis):
        return Miss("the order does not keep the pairs of the rotary embedding", x)
    tables, inner = (found.cos, found.sin), found.inner
    for node in inner:
        for user in node.users:
            if user is not x and user not in inner:
                return Miss(f"{node.name} is read by {op_name(user)} as well", user)
    if miss := changed_miss(found.x, *tables, *inner):
        return miss
    if any(len(shape_of(t)) != rank(basis) for t in (found.x, *tables)):
        return Miss("cosines and sines have other dimensions than what they rotate", x)
    if any(shape_of(t)[-1] != channels(basis) for t in tables):
        return Miss("cosines and sines have other channels than what they rotate", x)
    moved = in_basis(found.x, basis)
    for node in inner:
        node.replace_input_with(found.x, moved)
    for product, table in zip(inner[:2], tables, strict=True) if not is_rotation(basis) else ():
        product.replace_input_with(table, in_basis(table, basis, "stays"))
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


def keeps_halves(basis: Tensor) -> bool:
    """Whether channels ``i`` and ``i + D/2`` become ``j`` and ``j + D/2``."""
    half = basis.shape[-1] // 2
    first, second = basis[..., :half], basis[..., half:]
    return basis.shape[-1] % 2 == 0 and bool(
        (first < half).all() and (second == first + half).all()
    )


def keeps_neighbours(basis: Tensor) -> bool:
    """Whether channels ``2i`` and ``2i + 1`` become ``2j`` and ``2j + 1``."""
    if basis.shape[-1] % 2:
        return False
    first, second = basis[..., 0::2], basis[..., 1::2]
    return bool((first % 2 == 0).all() and (second == first + 1).all())


def turns_pairs(basis: Tensor, kind: Literal["halves", "neighbours"]) -> bool:
    """Whether a rotation turns each pair of channels in its plane, and mixes no two pairs."""
    count = channels(basis)
    if count % 2:
        return False
    shape, first = ((2, -1), (-4, -2)) if kind == "halves" else ((-1, 2), (-3, -1))
    # [..., component, pair, component, pair]
    parts = blocks(basis, count).squeeze(-3).unflatten(-1, shape).unflatten(-3, shape)
    parts = parts.movedim(first, (-4, -2))
    same = torch.eye(count // 2, dtype=torch.bool).expand(parts[..., 0, :, 0, :].shape)
    mixed = parts.transpose(-3, -2)[..., ~torch.eye(count // 2, dtype=torch.bool)]
    a, b, c, d = (parts[..., i, :, j, :][same] for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)))
    return not mixed.any() and a.equal(d) and b.equal(-c)


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
