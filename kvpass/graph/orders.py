"""Permutations of channels in a graph: their arithmetic, and the nodes that apply them.

An *index* says how a tensor's last dimension is permuted. It has as many dimensions as the tensor,
of size one where the permutation does not depend on them: ``[1, H, 1, D]`` permutes the channels of
each head of ``[B, H, n, D]``. It permutes tensors of size one in those dimensions as well, which it
broadcasts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvpass.graph.logical_calls import PermuteCall, PermuteWeightCall
from kvpass.ops import logical

_PREFIX = "_constant_"


def compact(index: Tensor) -> Tensor:
    """The same permutation, with size one in all dimensions that it does not depend on."""
    for dim in range(index.dim() - 1):
        first = index.narrow(dim, 0, 1)
        if bool((index == first).all()):
            index = first
    return index.contiguous()


def is_identity(index: Tensor) -> bool:
    """Whether nothing moves."""
    return bool((index == torch.arange(index.shape[-1])).all())


def composed(first: Tensor, then: Tensor) -> Tensor:
    """The index of ``permute(permute(x, first), then)``."""
    return compact(torch.take_along_dim(first, then, dim=-1))


def inverse(index: Tensor) -> Tensor:
    """The index that undoes ``index``."""
    return index.argsort(dim=-1)


def embedded(index: Tensor, start: int, channels: int) -> Tensor:
    """``index`` on the channels from ``start`` on, of ``channels``; the others stay."""
    every = torch.arange(channels).expand(*index.shape[:-1], channels).clone()
    every[..., start : start + index.shape[-1]] = index + start
    return every


def part(index: Tensor, start: int, stop: int) -> Tensor | None:
    """The index of the channels ``start ... stop``; None if they mix with others."""
    inside = index[..., start:stop] - start
    if bool(((inside < 0) | (inside >= stop - start)).any()):
        return None
    return compact(inside)


def merged(index: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The flat index ``[C]`` that does to ``prod(sizes)`` channels what ``index`` does to their
    view as ``[..., *sizes]``; None if it depends on the other dimensions, too."""
    if any(size != 1 for size in index.shape[: -len(sizes)]):
        return None
    channels = torch.arange(math.prod(sizes)).view(*sizes)
    inner = index.reshape(index.shape[-len(sizes) :])
    return torch.take_along_dim(channels, inner.expand(*sizes), dim=-1).flatten()


def flat(index: Tensor) -> Tensor | None:
    """``index`` as ``[C]``; None if it depends on other dimensions than the last."""
    return merged(index, index.shape[-1:])


def index_of(node: Node) -> Tensor:
    """The index of a ``permute_channels`` or the order of a ``permute_weight``, on the CPU."""
    call = PermuteCall.of(node) or PermuteWeightCall.at(node)
    return constant_value(call.order).cpu()


def constant_value(order: Node) -> Tensor:
    """The tensor of a ``get_attr`` node that `constant_node` made."""
    return _owner(order.graph).get_buffer(str(order.target))


def on_device(index: Tensor, device: torch.device) -> Tensor:
    """A constant where a graph reads it. (Only this touches the device while a graph is worked on:
    a dry run for a GPU that is not there puts a stand-in here.)"""
    return index.to(device)


def constant_node(graph: Graph, index: Tensor, device: torch.device) -> Node:
    """The constant ``index`` on a device: one node for all that are equal."""
    owner = _owner(graph)
    text = f"{tuple(index.shape)} {device}".encode() + index.numpy().tobytes()
    name = f"{_PREFIX}{hashlib.sha256(text).hexdigest()[:16]}"
    known: list[Node] = [n for n in graph.find_nodes(op="get_attr") if n.target == name]
    if known:
        return known[0]
    owner.register_buffer(name, on_device(index, device), persistent=False)
    with graph.inserting_before(_first_op(graph)):
        node = graph.get_attr(name)
    node.meta["example_value"] = owner.get_buffer(name)
    return node


def constant_beside(graph: Graph, value: Tensor, x: Node) -> Node:
    """The constant ``value`` on the device of ``x``, for a call that gets both."""
    example = x.meta["example_value"]
    node = constant_node(graph, value, example.device)
    node.meta["example_value"] = example.new_empty(value.shape, dtype=value.dtype)
    return node


def drop_constants(graph: Graph) -> None:
    """Takes all constants from the graph's module: none is read any more."""
    owner = _owner(graph)
    for node in [n for n in graph.find_nodes(op="get_attr") if is_constant(n)]:
        graph.erase_node(node)
    for name in [n for n, _ in owner.named_buffers() if n.startswith(_PREFIX)]:
        delattr(owner, name)


def _owner(graph: Graph) -> GraphModule:
    assert graph.owning_module is not None
    return graph.owning_module


def is_constant(node: Node) -> bool:
    """Whether `constant_node` made ``node``."""
    return node.op == "get_attr" and str(node.target).startswith(_PREFIX)


def permuted(x: Node, index: Tensor, kind: str = "up", before: Node | None = None) -> Node:
    """``x`` with its channels permuted; ``x`` if nothing moves.

    Args:
        x: a tensor of the graph.
        index: see the module's docstring.
        kind: where it is to be moved: ``up`` to what computes ``x``, ``down`` to what reads it, or
            ``stays``.
        before: where it is computed, by default right behind ``x``.
    """
    index = compact(index)
    if is_identity(index):
        return x
    example = x.meta["example_value"]
    call = PermuteCall(x, constant_node(x.graph, index, example.device))
    for user in x.users if before is None else ():
        if PermuteCall.of(user) == call:
            return user
    after = max(x, _first_op(x.graph).prev) if before is None else before.prev
    with x.graph.inserting_after(after):
        node = call.insert(x.graph)
    node.meta = {k: v for k, v in x.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["permutation"] = kind
    sizes = zip(example.shape, index.shape, strict=True)
    node.meta["example_value"] = example.new_empty([n if i == 1 else i for n, i in sizes])
    return node


def is_permutation(node: Any) -> bool:
    """Whether ``node`` permutes channels."""
    return isinstance(node, Node) and node.target is logical.permute_channels


def _first_op(graph: Graph) -> Node:
    """The first node that is neither an argument nor a constant."""
    first: Node = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    return first
