"""Permutations of channels, and operations that move elements or choose some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import same_shape
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
from kvpass.graph.pattern import Miss, argument, op_name
from kvpass.rules.permutation.base import Moved, PushDown, PushUp, changed_miss, is_last, shape_of


# P(Q(x)) = (P o Q)(x)
class Compose(PushUp):
    """Two permutations are one, or none."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        if not is_permutation(x):
            return None
        device = x.meta["example_value"].device
        x.update_arg(1, constant_node(x.graph, composed(index_of(x), index), device))
        return [x]


# P(transpose(x)) = transpose(P'(x)),  where P' is P with its own dimensions transposed likewise
class Transpose(PushUp, PushDown):
    """Through a change of the dimensions' order that leaves the last one in place."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        dims = _order_of_dims(x)
        if not dims or dims[-1] != len(dims) - 1:
            return Miss("the channels are transposed", x) if dims else None
        source = x.all_input_nodes[0]
        if miss := changed_miss(source):
            return miss
        back = [dims.index(d) for d in range(len(dims))]
        moved = permuted(source, index.permute(back))
        x.replace_input_with(source, moved)
        return _new(moved, source)

    def down(self, reader: Node, permute: Node, index: Tensor) -> Moved:
        """See `PushDown.down`."""
        dims = _order_of_dims(reader)
        if not dims or dims[-1] != len(dims) - 1:
            return Miss("the channels are transposed", reader) if dims else None
        return sunk(reader, permute, index.permute(dims))


# P(reshape(x, [..., a, b])) = reshape(P'(x), [..., a, b]),  P' on a * b channels doing what P does
class Reshape(PushUp, PushDown):
    """Through a view that splits the channels into heads (up), or joins them (down), or leaves
    them as they are."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        if op_name(x) != "reshape":
            return None
        (source, *_) = x.all_input_nodes
        moved = _through(shape_of(source), shape_of(x), index)
        if moved is None:
            return Miss("the view does more than split the channels into heads", x)
        if miss := changed_miss(source):
            return miss
        new = permuted(source, moved)
        x.replace_input_with(source, new)
        return _new(new, source)

    def down(self, reader: Node, permute: Node, index: Tensor) -> Moved:
        """See `PushDown.down`."""
        if op_name(reader) != "reshape":
            return None
        moved = _through(shape_of(reader), shape_of(permute), index)
        if moved is None:
            return Miss("the view does more than join heads to channels", reader)
        return sunk(reader, permute, moved)


# P(x[..., a:b]) = P'(x)[..., a:b],  where P' is P on the channels a ... b and moves no others
class Slice(PushUp):
    """Through a choice of channels: ``x[..., a:b]``, ``chunk`` or ``split``."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        if op_name(x) != "getitem":
            return None
        found = chosen_channels(x)
        if found is None:
            return Miss("it is no run of channels", x)
        source, start, stop = found
        if stop - start != index.shape[-1]:
            return Miss("it is no run of channels", x)
        whole = embedded(index, start, int(shape_of(source)[-1]))
        if miss := changed_miss(source):
            return miss
        parts = x.all_input_nodes[0] if x.all_input_nodes[0] is not source else x
        others = [user for user in source.users if user is not parts]
        for other in others:
            if not is_permutation(other) and not unmoved(other, whole):
                return Miss(f"{source.name} is read by {op_name(other)} as well", other)
        moved = permuted(source, whole)
        for other in others:
            if not is_permutation(other):
                other.replace_input_with(source, moved)
        parts.replace_input_with(source, moved)
        return _new(moved, source)


# P(cat([a, b], -1)) = cat([P1(a), P2(b)], -1),  where P is P1 on the channels of a and P2 on b's
# P(cat([a, b], d))  = cat([P(a), P(b)], d),     for other dimensions d that P does not depend on
class Cat(PushUp):
    """Through what joins channels, as partial rotary embeddings do, or tokens."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        if op_name(x) != "cat":
            return None
        tensors, dim = argument(x, "tensors"), argument(x, "dim")
        if not isinstance(tensors, list | tuple) or not isinstance(dim, int):
            return Miss("it is unknown what is joined", x)
        if is_last(dim, x):
            parts = _parts(index, [int(shape_of(t)[-1]) for t in tensors])
        else:
            parts = [index] * len(tensors) if index.shape[dim] == 1 else None
        if parts is None or any(len(shape_of(t)) != index.dim() for t in tensors):
            return Miss("the order mixes channels that are joined", x)
        if miss := changed_miss(*tensors):
            return miss
        moved = [permuted(t, i) for t, i in zip(tensors, parts, strict=True)]
        new = type(tensors)(moved)
        if "tensors" in x.kwargs:
            x.update_kwarg("tensors", new)
        else:
            x.update_arg(0, new)
        return [m for m, t in zip(moved, tensors, strict=True) if m is not t]


def _new(moved: Node, source: Node) -> list[Node]:
    return [] if moved is source else [moved]


def sunk(reader: Node, permute: Node, index: Tensor) -> list[Node]:
    """``reader`` reads what ``permute`` does, and is permuted by ``index`` itself."""
    new = permuted(reader, index, "down")
    if new is not reader:
        reader.replace_all_uses_with(new, lambda user: user is not new)
    reader.replace_input_with(permute, permute.all_input_nodes[0])
    return _new(new, reader)


def _order_of_dims(node: Node) -> list[int] | None:
    """``d`` such that dimension ``i`` of ``node`` is dimension ``d[i]`` of what it reads."""
    if op_name(node) == "transpose":
        dims = list(range(len(shape_of(node))))
        first, second = (argument(node, n) for n in ("dim0", "dim1"))
        if not isinstance(first, int) or not isinstance(second, int):
            return None
        dims[first], dims[second] = dims[second], dims[first]
        return dims
    if op_name(node) == "permute":
        given: Any = node.args[1:] or (node.kwargs.get("dims"),)
        order = given[0] if isinstance(given[0], list | tuple) else given
        return [d % len(order) for d in order]
    return None


def _through(joined: Sequence[Any], split: Sequence[Any], index: Tensor) -> Tensor | None:
    """The index on ``joined`` that does what ``index`` does on its view ``split``."""
    if same_shape(joined, split):
        return index
    channels = joined[-1]
    for count in range(1, len(split) + 1):
        sizes = split[-count:]
        if not all(isinstance(size, int) for size in sizes):
            return None
        if math.prod(sizes) == channels:
            found = merged(index, sizes)
            return None if found is None else found.view(*[1] * (len(joined) - 1), -1)
    return None


def _parts(index: Tensor, sizes: Sequence[int]) -> list[Tensor] | None:
    parts, start = [], 0
    for size in sizes:
        inside = part(index, start, start + size)
        if inside is None:
            return None
        parts.append(inside)
        start += size
    return parts


def chosen_channels(node: Node) -> tuple[Node, int, int] | None:
    """``(x, a, b)`` if ``node`` is ``x[..., a:b]``, or such a part of ``chunk`` or ``split``."""
    source, item = node.args[0], node.args[1]
    assert isinstance(source, Node)
    if op_name(source) in ("chunk", "split") and isinstance(item, int):
        base = argument(source, "input")
        if not is_last(argument(source, "dim"), base):
            return None
        widths = [int(t.shape[-1]) for t in source.meta["example_value"]]
        item %= len(widths)
        return base, sum(widths[:item]), sum(widths[: item + 1])
    steps = last_slice(node)
    if steps is None or steps.step != 1:
        return None
    return source, steps.start, max(steps.start, steps.stop)


def last_slice(node: Node) -> range | None:
    """The channels that ``node`` chooses if it is ``x[..., a:b:c]``."""
    if op_name(node) != "getitem" or not isinstance(source := node.args[0], Node):
        return None
    example, index = source.meta.get("example_value"), node.args[1]
    if not isinstance(example, Tensor) or not isinstance(index, tuple) or not index:
        return None
    *others, last = index
    rest = [i for i in others if i is not Ellipsis]
    if any(not isinstance(i, slice) or i != slice(None) for i in rest):
        return None
    if len(rest) == len(others) and len(index) != example.dim():
        return None
    if not isinstance(last, slice):
        return None
    bounds: Any = (last.start, last.stop, last.step)
    if any(not isinstance(bound, int | None) for bound in bounds):
        return None
    return range(*slice(*bounds).indices(int(example.shape[-1])))


# f(x) = f(P(x)),  for f that chooses channels which P does not move, and for sums of squares
def unmoved(reader: Node, index: Tensor) -> bool:
    """Whether ``reader`` gives the same of ``permute(x, index)`` as of ``x``, which it reads."""
    if op_name(reader) == "getitem":
        chosen = last_slice(reader)
        if chosen is None:
            return False
        places = torch.tensor(list(chosen), dtype=torch.int64)
        return bool((index[..., places] == places).all())
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
