"""What it takes to move a permutation of channels through one operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import is_subclass
from kvpass.graph.orders import compact, composed, constant_node, index_of
from kvpass.graph.pattern import Miss, argument, op_name
from kvpass.ops import logical

# What a push hands back: the permutations that took the place of the one it moved.
Moved = list[Node] | Miss | None


class PushUp(ABC):
    """An identity that moves a permutation up to what computes its input. Subclasses state theirs
    in a comment above the class; ``P`` is a permutation of the last dimension."""

    @abstractmethod
    def up(self, x: Node, index: Tensor) -> Moved:
        """Lets ``x`` compute ``permute(x, index)``, of which it is sure that nothing else reads
        ``x``.

        Returns:
            The permutations of what ``x`` reads that this takes (empty: they are gone); a `Miss`
            with the reason, and nothing changed; None if ``x`` is another operation.
        """


class PushDown(ABC):
    """An identity that moves a permutation down, behind the only operation that reads it."""

    @abstractmethod
    def down(self, reader: Node, permute: Node, index: Tensor) -> Moved:
        """Lets ``reader`` read ``x`` instead of ``permute``, which is ``permute(x, index)``.

        Returns:
            As `PushUp.up`; the permutations are of ``reader``.
        """


def weight_miss(weight: Any) -> Miss | None:
    """Why ``weight`` cannot be permuted once and for all, or None if it can."""
    source = weight
    if isinstance(weight, Node) and weight.target is logical.permute_weight:
        source = weight.args[0]
    if not isinstance(source, Node) or source.op != "placeholder":
        return Miss("the weight is computed in the graph", weight)
    example = source.meta["example_value"]
    if not isinstance(example, torch.nn.Parameter) or is_subclass(example):
        return Miss("the weight is no plain parameter", source)
    return None


def dim_miss(weight: Node, dim: int) -> Miss | None:
    """Why ``weight`` cannot be permuted along ``dim``, or None if it can."""
    if miss := weight_miss(weight):
        return miss
    if weight.target is logical.permute_weight and weight.args[2] != dim:
        return Miss("the weight is permuted along another dimension as well", weight)
    return None


def folded(weight: Node, index: Tensor, dim: int = 0) -> Node:
    """``weight``, for which `dim_miss` is None, with its entries along ``dim`` permuted. Who else
    reads it keeps the original.

    Args:
        weight: a parameter's placeholder, or that permuted.
        index: of any shape for a vector, which then gets its shape.
        dim: a dimension of the weight.
    """
    if weight.target is logical.permute_weight:
        before = index_of(weight)
        rank = max(before.dim(), index.dim())
        aligned = (x.view(*[1] * (rank - x.dim()), *x.shape) for x in (before, index))
        index = vector_index(composed(*aligned))
        return folded(weight.all_input_nodes[0], index, dim)
    graph, example = weight.graph, weight.meta["example_value"]
    order = constant_node(graph, index, example.device)
    args = (weight, order, dim)
    for user in weight.users:
        if user.target is logical.permute_weight and user.args == args:
            return user
    with graph.inserting_after(order):
        node = graph.call_function(logical.permute_weight, args)
    shape = (*example.shape[:dim], *index.shape, *example.shape[dim + 1 :])
    with torch.no_grad():
        node.meta["example_value"] = example.new_empty(shape)
    return node


def vector_index(index: Tensor) -> Tensor:
    """``index`` without its first dimensions of size one: what it does to a vector that is
    broadcast."""
    index = compact(index)
    while index.dim() > 1 and index.shape[0] == 1:
        index = index[0]
    return index


def changed_miss(*nodes: Node) -> Miss | None:
    """Why one of ``nodes`` cannot be permuted before it is read: it is changed in place."""
    found = next((n for n in nodes if "changed" in n.meta), None)
    return None if found is None else Miss("it is changed in place", found)


def shape_of(node: Node) -> Any:
    """The shape of a node's tensor."""
    return node.meta["example_value"].shape


def operands(node: Node) -> tuple[Any, Any]:
    """Both arguments of a binary operation."""
    return argument(node, "input"), argument(node, "other")


def replace_argument(node: Node, name: str, old: Node, new: Node) -> None:
    """Lets ``node`` read ``new`` as its argument ``name``, which is ``old``: a weight, or what is
    computed from one and not needed any more where nothing else reads it."""
    if name in node.kwargs:
        node.update_kwarg(name, new)
    else:
        node.update_arg(next(i for i, value in enumerate(node.args) if value is old), new)
    while not old.users and old.op in ("call_function", "call_method"):
        unread, old = old, old.all_input_nodes[0]
        unread.graph.erase_node(unread)


def is_last(dim: Any, node: Node) -> bool:
    """Whether ``dim`` is the last dimension of ``node``."""
    return isinstance(dim, int) and dim in (-1, len(shape_of(node)) - 1)


def alone(nodes: Iterable[Node], readers: Iterable[Node]) -> Miss | None:
    """Why one of ``nodes`` is read by others than ``readers``, or None."""
    known = set(readers)
    for node in nodes:
        for user in node.users:
            if user not in known:
                return Miss(f"{node.name} is read by {op_name(user)} as well", user)
    return None
