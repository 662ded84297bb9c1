"""What it takes to move a permutation of channels through one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import is_subclass
from kvpass.graph.logical_calls import PermuteWeightCall
from kvpass.graph.orders import compact, composed, constant_node, index_of, permuted
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, set_argument

# What a push returns: the permutations that took the place of the one it moved (empty: it is gone);
# a `Miss` with the reason, and nothing changed; None if it is about another operation.
Moved = list[Node] | Miss | None
# An identity that moves a permutation up, to what computes its input ``x``, which nothing else may
# read: ``up(x, index)`` lets ``x`` compute ``permute(x, index)``. It is stated in a comment above
# the function; ``P`` is a permutation of the last dimension.
PushUp = Callable[[Node, Tensor], Moved]
# An identity that moves a permutation down, behind the only operation that reads it:
# ``down(reader, permute, index)`` lets ``reader`` read ``x`` instead of ``permute``, which is
# ``permute(x, index)``, and permutes ``reader``.
PushDown = Callable[[Node, Node, Tensor], Moved]


def moved_up(x: Node, source: Node, index: Tensor) -> Moved:
    """Lets ``x`` read its input ``source`` permuted by ``index``; see `PushUp`."""
    if miss := changed_miss(source):
        return miss
    moved = permuted(source, index)
    x.replace_input_with(source, moved)
    return [] if moved is source else [moved]


def moved_down(reader: Node, permute: Node, index: Tensor) -> Moved:
    """Lets ``reader`` read what ``permute`` does, and permutes it by ``index`` itself; see
    `PushDown`."""
    moved = permuted(reader, index, "down")
    if moved is not reader:
        reader.replace_all_uses_with(moved, lambda user: user is not moved)
    reader.replace_input_with(permute, permute.all_input_nodes[0])
    return [] if moved is reader else [moved]


def changed_miss(*nodes: Node) -> Miss | None:
    """Why one of ``nodes`` cannot be permuted before it is read: it is changed in place."""
    found = next((n for n in nodes if "changed" in n.meta), None)
    return None if found is None else Miss("it is changed in place", found)


def weight_miss(weight: Node, dim: int) -> Miss | None:
    """Why ``weight`` cannot be permuted along ``dim`` once and for all; None if it can."""
    call = PermuteWeightCall.of(weight)
    source = weight if call is None else call.weight
    if source.op != "placeholder":
        return Miss("the weight is computed in the graph", weight)
    example = source.meta["example_value"]
    if not isinstance(example, torch.nn.Parameter) or is_subclass(example):
        return Miss("the weight is no plain parameter", source)
    if call is not None and call.dim != dim:
        return Miss("the weight is permuted along another dimension as well", weight)
    return None


def folded(weight: Node, index: Tensor, dim: int = 0) -> Node:
    """``weight`` with its entries along ``dim`` permuted. Who else reads it keeps the original.

    Args:
        weight: a parameter's placeholder, or that permuted; `weight_miss` is None.
        index: of any shape for a vector, which then gets its shape.
        dim: a dimension of the weight.
    """
    if (known := PermuteWeightCall.of(weight)) is not None:
        before = index_of(weight)
        rank = max(before.dim(), index.dim())
        aligned = (x.view(*[1] * (rank - x.dim()), *x.shape) for x in (before, index))
        return folded(known.weight, vector_index(composed(*aligned)), dim)
    graph, example = weight.graph, weight.meta["example_value"]
    order = constant_node(graph, index, example.device)
    call = PermuteWeightCall(weight, order, dim)
    for user in weight.users:
        if PermuteWeightCall.of(user) == call:
            return user
    with graph.inserting_after(order):
        node = call.insert(graph)
    with torch.no_grad():
        shape = (*example.shape[:dim], *index.shape, *example.shape[dim + 1 :])
        node.meta["example_value"] = example.new_empty(shape)
    return node


def vector_index(index: Tensor) -> Tensor:
    """``index`` without its first dimensions of size one: what it does to a vector that is
    broadcast."""
    index = compact(index)
    while index.dim() > 1 and index.shape[0] == 1:
        index = index[0]
    return index


def shape_of(node: Node) -> Any:
    """The shape of a node's tensor."""
    return node.meta["example_value"].shape


def operands(node: Node) -> tuple[Any, Any]:
    """Both arguments of a binary operation."""
    return argument(node, "input"), argument(node, "other")


def replace_argument(node: Node, name: str, old: Node, new: Node) -> None:
    """Lets ``node`` read ``new`` as its argument ``name``, which is ``old``: a weight, or what is
    computed from one and not needed any more where nothing else reads it."""
    set_argument(node, name, new)
    while not old.users and old.op in ("call_function", "call_method"):
        unread, old = old, old.all_input_nodes[0]
        unread.graph.erase_node(unread)


def is_last(dim: Any, node: Node) -> bool:
    """Whether ``dim`` is the last dimension of ``node``."""
    return isinstance(dim, int) and dim in (-1, len(shape_of(node)) - 1)
