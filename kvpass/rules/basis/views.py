"""Bases of channels, and operations that move elements or choose some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torch.fx import Node

from kvpass._torch_sizes import same_shape
from kvpass.graph.analysis.reads import permuted_dims
from kvpass.graph.analysis.scores import number
from kvpass.graph.bases import (
    basis_of,
    changes_basis,
    channels,
    composed,
    constant_node,
    embedded,
    in_basis,
    is_rotation,
    leaves,
    merged,
    on_rank,
    part,
    rank,
    transposed,
)
from kvpass.graph.logical_calls import BasisCall
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name, set_argument
from kvpass.rules.basis.base import (
    Moved,
    changed_miss,
    is_last,
    moved_down,
    moved_up,
    shape_of,
)


# R(Q(x)) = (R o Q)(x)
def compose_up(x: Node, basis: Tensor) -> Moved:
    """Two changes are one, or none."""
    if (call := BasisCall.of(x)) is None:
        return None
    both, device = composed(basis_of(x), basis), x.meta["example_value"].device
    BasisCall(call.x, constant_node(x.graph, both, device)).write(x)
    return [x]


# R(transpose(x)) = transpose(R'(x)),  where R' is R with its own dimensions transposed likewise
def transpose_up(x: Node, basis: Tensor) -> Moved:
    """Moves through a change of the dimensions' order that leaves the last one in place."""
    dims = _order_of_dims(x)
    if not isinstance(dims, list):
        return dims
    back = [dims.index(d) for d in range(len(dims))]
    return moved_up(x, x.all_input_nodes[0], transposed(basis, back))


def transpose_down(reader: Node, rotate: Node, basis: Tensor) -> Moved:
    """Moves behind a change of the dimensions' order that leaves the last one in place."""
    dims = _order_of_dims(reader)
    if not isinstance(dims, list):
        return dims
    return moved_down(reader, rotate, transposed(basis, dims))


def _order_of_dims(node: Node) -> list[int] | Miss | None:
    """``d`` such that dimension ``i`` of ``node`` is dimension ``d[i]`` of what it reads."""
    if op_name(node) == "transpose":
        dims = list(range(len(shape_of(node))))
        first, second = (argument(node, n) for n in ("dim0", "dim1"))
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        dims[first], dims[second] = dims[second], dims[first]
    elif op_name(node) == "permute":
        dims = permuted_dims(node)
    else:
        return None
    return dims if dims[-1] == len(dims) - 1 else Miss("the channels are transposed", node)


# R(reshape(x, [..., a, b])) = reshape(R'(x), [..., a, b]),  R' on a * b channels doing what R does
def reshape_up(x: Node, basis: Tensor) -> Moved:
    """Moves through a view that splits channels into heads, or leaves them as they are."""
    if op_name(x) != "reshape":
        return None
    source = x.all_input_nodes[0]
    before = _through(shape_of(source), shape_of(x), basis)
    if before is None:
        return Miss("the view does more than split the channels into heads", x)
    return moved_up(x, source, before)


def reshape_down(reader: Node, rotate: Node, basis: Tensor) -> Moved:
    """Moves behind a view that joins heads to channels, or leaves them as they are."""
    if op_name(reader) != "reshape":
        return None
    behind = _through(shape_of(reader), shape_of(rotate), basis)
    if behind is None:
        return Miss("the view does more than join heads to channels", reader)
    return moved_down(reader, rotate, behind)


def _through(joined: Sequence[Any], split: Sequence[Any], basis: Tensor) -> Tensor | None:
    """The basis on ``joined`` that does what ``basis`` does on its view ``split``."""
    if same_shape(joined, split):
        return basis
    for count in range(1, len(split) + 1):
        sizes = split[-count:]
        if not all(isinstance(size, int) for size in sizes):
            return None
        if math.prod(sizes) == joined[-1]:
            found = merged(basis, sizes)
            return None if found is None else on_rank(found, len(joined))
    return None


# R(x[..., a:b]) = R'(x)[..., a:b],  where R' is R on the channels a ... b and leaves the others
def slice_up(x: Node, basis: Tensor) -> Moved:
    """Moves through a choice of channels: ``x[..., a:b]``, ``chunk`` or ``split``."""
    if op_name(x) != "getitem":
        return None
    found = _chosen_channels(x)
    if found is None or found[2] - found[1] != channels(basis):
        return Miss("it is no run of channels", x)
    source, start, _ = found
    if miss := changed_miss(source):
        return miss
    every = embedded(basis, start, int(shape_of(source)[-1]))
    parts = x.all_input_nodes[0] if x.all_input_nodes[0] is not source else x
    others = [user for user in source.users if user is not parts and not changes_basis(user)]
    for other in others:
        if not unmoved(other, every):
            return Miss(f"{source.name} is read by {op_name(other)} as well", other)
    moved = in_basis(source, every)
    for reader in (*others, parts):
        reader.replace_input_with(source, moved)
    return [] if moved is source else [moved]


def _chosen_channels(node: Node) -> tuple[Node, int, int] | None:
    """``(x, a, b)`` if ``node`` is ``x[..., a:b]``, or such a part of ``chunk`` or ``split``."""
    source, item = argument(node, "input"), argument(node, "index")
    if op_name(source) in ("chunk", "split") and isinstance(item, int):
        base = argument(source, "input")
        if not is_last(argument(source, "dim"), base):
            return None
        ends = [0, *accumulate(int(t.shape[-1]) for t in source.meta["example_value"])]
        item %= len(ends) - 1
        return base, ends[item], ends[item + 1]
    channels = last_slice(node)
    if channels is None or channels.step != 1:
        return None
    return source, channels.start, max(channels.start, channels.stop)


# R(cat([a, b], -1)) = cat([R1(a), R2(b)], -1),  where R is R1 on the channels of a and R2 on b's
# R(cat([a, b], d))  = cat([R(a), R(b)], d),     for other dimensions d that R does not depend on
def cat_up(x: Node, basis: Tensor) -> Moved:
    """Moves through what joins channels, as partial rotary embeddings do, or tokens."""
    if op_name(x) != "cat":
        return None
    tensors, dim = argument(x, "tensors"), argument(x, "dim")
    if not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return Miss("it is unknown what is joined", x)
    parts: list[Tensor | None]
    if is_last(dim, x):
        ends = [0, *accumulate(int(shape_of(t)[-1]) for t in tensors)]
        parts = [part(basis, *bounds) for bounds in pairwise(ends)]
    else:
        parts = [basis if basis.shape[dim % rank(basis)] == 1 else None] * len(tensors)
    known = [p for p in parts if p is not None]
    if len(known) < len(parts) or any(len(shape_of(t)) != rank(basis) for t in tensors):
        return Miss("it mixes channels that are joined", x)
    if miss := changed_miss(*tensors):
        return miss
    moved = [in_basis(t, i) for t, i in zip(tensors, known, strict=True)]
    set_argument(x, "tensors", type(tensors)(moved))
    return [m for m, t in zip(moved, tensors, strict=True) if m is not t]


def joins_last(node: Node) -> bool:
    """Whether ``node`` joins its tensors along the last dimension of its result."""
    return is_last(argument(node, "dim"), node)


def last_slice(node: Any) -> range | None:
    """The channels that ``node`` chooses if it is ``x[..., a:b:c]``."""
    if op_name(node) != "getitem" or not isinstance(source := argument(node, "input"), Node):
        return None
    example, basis = source.meta.get("example_value"), argument(node, "index")
    if not isinstance(example, Tensor) or not isinstance(basis, tuple) or not basis:
        return None
    *others, last = basis
    rest = [i for i in others if i is not Ellipsis]
    if any(not isinstance(i, slice) or i != slice(None) for i in rest):
        return None
    if len(rest) == len(others) and len(basis) != example.dim():
        return None
    bounds = (last.start, last.stop, last.step) if isinstance(last, slice) else ()
    if not bounds or any(not isinstance(bound, int | None) for bound in bounds):
        return None
    return range(*last.indices(int(example.shape[-1])))


# f(x) = f(R(x)),  for f that chooses channels which R leaves, and for the mean of squares
# f(x) = f(P(x)),  for the means of all powers
def unmoved(reader: Node, basis: Tensor) -> bool:
    """Whether ``reader`` gives the same of ``rotate(x, basis)`` as of ``x``, which it reads."""
    if op_name(reader) == "getitem":
        chosen = last_slice(reader)
        if chosen is None:
            return False
        return leaves(basis, list(chosen))
    if op_name(reader) == "pow":
        if is_rotation(basis) and number(argument(reader, "exponent")) != 2:
            return False
        reads_only = reader.all_input_nodes == [argument(reader, "input")]
        return reads_only and bool(reader.users) and all(map(_is_mean, reader.users))
    return _is_mean(reader) and not is_rotation(basis)


def _is_mean(node: Node) -> bool:
    """Whether ``node`` is the mean over the channels of what it reads."""
    dim = argument(node, "dim") if op_name(node) == "mean" else None
    dims = dim if isinstance(dim, list | tuple) else [dim]
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    return dim is not None and len(dims) == 1 and is_last(dims[0], source)
