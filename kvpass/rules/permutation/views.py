"""Permutations of channels, and operations that move elements or choose some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import same_shape
from kvpass.graph.analysis.reads import permuted_dims
from kvpass.graph.logical_calls import PermuteCall
from kvpass.graph.orders import (
    composed,
    constant_node,
    embedded,
    index_of,
    is_permutation,
    merged,
    part,
    permuted,
)
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name, set_argument
from kvpass.rules.permutation.base import (
    Moved,
    changed_miss,
    is_last,
    moved_down,
    moved_up,
    shape_of,
)


# P(Q(x)) = (P o Q)(x)
def compose_up(x: Node, index: Tensor) -> Moved:
    """Two permutations are one, or none."""
    if (call := PermuteCall.of(x)) is None:
        return None
    both, device = composed(index_of(x), index), x.meta["example_value"].device
    PermuteCall(call.x, constant_node(x.graph, both, device)).write(x)
    return [x]


# P(transpose(x)) = transpose(P'(x)),  where P' is P with its own dimensions transposed likewise
def transpose_up(x: Node, index: Tensor) -> Moved:
    """Moves through a change of the dimensions' order that leaves the last one in place."""
    dims = _order_of_dims(x)
    if not isinstance(dims, list):
        return dims
    back = [dims.index(d) for d in range(len(dims))]
    return moved_up(x, x.all_input_nodes[0], index.permute(back))


def transpose_down(reader: Node, permute: Node, index: Tensor) -> Moved:
    """Moves behind a change of the dimensions' order that leaves the last one in place."""
    dims = _order_of_dims(reader)
    if not isinstance(dims, list):
        return dims
    return moved_down(reader, permute, index.permute(dims))


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


# P(reshape(x, [..., a, b])) = reshape(P'(x), [..., a, b]),  P' on a * b channels doing what P does
def reshape_up(x: Node, index: Tensor) -> Moved:
    """Moves through a view that splits channels into heads, or leaves them as they are."""
    if op_name(x) != "reshape":
        return None
    source = x.all_input_nodes[0]
    before = _through(shape_of(source), shape_of(x), index)
    if before is None:
        return Miss("the view does more than split the channels into heads", x)
    return moved_up(x, source, before)


def reshape_down(reader: Node, permute: Node, index: Tensor) -> Moved:
    """Moves behind a view that joins heads to channels, or leaves them as they are."""
    if op_name(reader) != "reshape":
        return None
    behind = _through(shape_of(reader), shape_of(permute), index)
    if behind is None:
        return Miss("the view does more than join heads to channels", reader)
    return moved_down(reader, permute, behind)


def _through(joined: Sequence[Any], split: Sequence[Any], index: Tensor) -> Tensor | None:
    """The index on ``joined`` that does what ``index`` does on its view ``split``."""
    if same_shape(joined, split):
        return index
    for count in range(1, len(split) + 1):
        sizes = split[-count:]
        if not all(isinstance(size, int) for size in sizes):
            return None
        if math.prod(sizes) == joined[-1]:
            found = merged(index, sizes)
            return None if found is None else found.view(*[1] * (len(joined) - 1), -1)
    return None


# P(x[..., a:b]) = P'(x)[..., a:b],  where P' is P on the channels a ... b and moves no others
def slice_up(x: Node, index: Tensor) -> Moved:
    """Moves through a choice of channels: ``x[..., a:b]``, ``chunk`` or ``split``."""
    if op_name(x) != "getitem":
        return None
    found = _chosen_channels(x)
    if found is None or found[2] - found[1] != index.shape[-1]:
        return Miss("it is no run of channels", x)
    source, start, _ = found
    if miss := changed_miss(source):
        return miss
    every = embedded(index, start, int(shape_of(source)[-1]))
    parts = x.all_input_nodes[0] if x.all_input_nodes[0] is not source else x
    others = [user for user in source.users if user is not parts and not is_permutation(user)]
    for other in others:
        if not unmoved(other, every):
            return Miss(f"{source.name} is read by {op_name(other)} as well", other)
    moved = permuted(source, every)
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


# P(cat([a, b], -1)) = cat([P1(a), P2(b)], -1),  where P is P1 on the channels of a and P2 on b's
# P(cat([a, b], d))  = cat([P(a), P(b)], d),     for other dimensions d that P does not depend on
def cat_up(x: Node, index: Tensor) -> Moved:
    """Moves through what joins channels, as partial rotary embeddings do, or tokens."""
    if op_name(x) != "cat":
        return None
    tensors, dim = argument(x, "tensors"), argument(x, "dim")
    if not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return Miss("it is unknown what is joined", x)
    parts: list[Tensor | None]
    if is_last(dim, x):
        ends = [0, *accumulate(int(shape_of(t)[-1]) for t in tensors)]
        parts = [part(index, *bounds) for bounds in pairwise(ends)]
    else:
        parts = [index if index.shape[dim] == 1 else None] * len(tensors)
    known = [p for p in parts if p is not None]
    if len(known) < len(parts) or any(len(shape_of(t)) != index.dim() for t in tensors):
        return Miss("the order mixes channels that are joined", x)
    if miss := changed_miss(*tensors):
        return miss
    moved = [permuted(t, i) for t, i in zip(tensors, known, strict=True)]
    set_argument(x, "tensors", type(tensors)(moved))
    return [m for m, t in zip(moved, tensors, strict=True) if m is not t]


def joins_last(node: Node) -> bool:
    """Whether ``node`` joins its tensors along the last dimension of its result."""
    return is_last(argument(node, "dim"), node)


def last_slice(node: Any) -> range | None:
    """The channels that ``node`` chooses if it is ``x[..., a:b:c]``."""
    if op_name(node) != "getitem" or not isinstance(source := argument(node, "input"), Node):
        return None
    example, index = source.meta.get("example_value"), argument(node, "index")
    if not isinstance(example, Tensor) or not isinstance(index, tuple) or not index:
        return None
    *others, last = index
    rest = [i for i in others if i is not Ellipsis]
    if any(not isinstance(i, slice) or i != slice(None) for i in rest):
        return None
    if len(rest) == len(others) and len(index) != example.dim():
        return None
    bounds = (last.start, last.stop, last.step) if isinstance(last, slice) else ()
    if not bounds or any(not isinstance(bound, int | None) for bound in bounds):
        return None
    return range(*last.indices(int(example.shape[-1])))


# f(x) = f(P(x)),  for f that chooses channels which P does not move, and for sums of squares
def unmoved(reader: Node, index: Tensor) -> bool:
    """Whether ``reader`` gives the same of ``permute(x, index)`` as of ``x``, which it reads."""
    if op_name(reader) == "getitem":
        chosen = last_slice(reader)
        if chosen is None:
            return False
        channels = torch.tensor(list(chosen), dtype=torch.int64)
        return bool((index[..., channels] == channels).all())
    if op_name(reader) == "pow":
        reads_only = reader.all_input_nodes == [argument(reader, "input")]
        return reads_only and bool(reader.users) and all(map(_is_mean, reader.users))
    return _is_mean(reader)


def _is_mean(node: Node) -> bool:
    """Whether ``node`` is the mean over the channels of what it reads."""
    dim = argument(node, "dim") if op_name(node) == "mean" else None
    dims = dim if isinstance(dim, list | tuple) else [dim]
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    return dim is not None and len(dims) == 1 and is_last(dims[0], source)
