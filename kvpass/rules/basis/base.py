"""What it takes to move a change of basis through one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import is_subclass
from kvpass.graph.bases import (
    basis_of,
    compact,
    composed,
    constant_node,
    in_basis,
    is_rotation,
    rank,
)
from kvpass.graph.calls import parameter_of
from kvpass.graph.logical_calls import WeightBasisCall
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, set_argument

# What a push returns: the changes of basis that took the place of the one it moved (empty: it is
# gone); a `Miss` with the reason, and nothing changed; None if it is about another operation.
Moved = list[Node] | Miss | None
# An identity that moves a change of basis up, to what computes its input ``x``, which nothing else
# may read: ``up(x, basis)`` lets ``x`` compute ``rotate(x, basis)``. It is stated in a comment
# above the function: ``R`` is any change of the last dimension, ``P`` only a permutation.
PushUp = Callable[[Node, Tensor], Moved]
# An identity that moves it down, behind the only operation that reads it:
# ``down(reader, rotate, basis)`` lets ``reader`` read ``x`` instead of ``rotate``, which is
# ``rotate(x, basis)``, and changes the basis of ``reader``.
PushDown = Callable[[Node, Node, Tensor], Moved]


def moved_up(x: Node, source: Node, basis: Tensor) -> Moved:
    """Lets ``x`` read its input ``source`` in ``basis``; see `PushUp`."""
    if miss := changed_miss(source):
        return miss
    moved = in_basis(source, basis)
    x.replace_input_with(source, moved)
    return [] if moved is source else [moved]


def moved_down(reader: Node, rotate: Node, basis: Tensor) -> Moved:
    """Lets ``reader`` read what ``rotate`` does, and brings it to ``basis`` itself; see
    `PushDown`."""
    moved = in_basis(reader, basis, "down")
    if moved is not reader:
        reader.replace_all_uses_with(moved, lambda user: user is not moved)
    reader.replace_input_with(rotate, rotate.all_input_nodes[0])
    return [] if moved is reader else [moved]


def changed_miss(*nodes: Node) -> Miss | None:
    """Why one of ``nodes`` cannot be rotated before it is read: it is changed in place."""
    found = next((n for n in nodes if "changed" in n.meta), None)
    return None if found is None else Miss("it is changed in place", found)


def weight_miss(weight: Node, dim: int) -> Miss | None:
    """Why ``weight`` cannot be rotated along ``dim`` once and for all; None if it can."""
    call = WeightBasisCall.of(weight)
    read = weight if call is None else call.weight
    source = parameter_of(read)
    if source.op != "placeholder":
        return Miss("the weight is computed in the graph", weight)
    example = source.meta["example_value"]
    # What is computed with a part of it is plain; a layer of ``DTensor`` as a whole is not.
    plain = source is not read or not is_subclass(example)
    if not isinstance(example, torch.nn.Parameter) or not plain:
        return Miss("the weight is no plain parameter", source)
    if call is not None and call.dim != dim:
        return Miss("the weight is rotated along another dimension as well", weight)
    return None


def folded(weight: Node, basis: Tensor, dim: int = 0) -> Node:
    """``weight`` with its entries along ``dim`` in another basis. Who else reads it keeps the
    original.

    Args:
        weight: a parameter's placeholder, or this process's part of it, or that rotated;
            `weight_miss` is None.
        basis: a flat one; for a vector also an order of any shape, which it then gets.
        dim: a dimension of the weight.
    """
    if (known := WeightBasisCall.of(weight)) is not None:
        before = basis_of(weight)
        dims = max(rank(before), rank(basis))
        aligned = (x.view(*[1] * (dims - rank(x)), *x.shape) for x in (before, basis))
        return folded(known.weight, of_vector(composed(*aligned)), dim)
    graph, example = weight.graph, weight.meta["example_value"]
    constant = constant_node(graph, basis, example.device)
    call = WeightBasisCall(weight, constant, dim)
    for user in weight.users:
        if WeightBasisCall.of(user) == call:
            return user
    with graph.inserting_after(max(constant, weight)):
        node = call.insert(graph)
    with torch.no_grad():
        own = example.shape[dim : dim + 1] if is_rotation(basis) else basis.shape
        shape = (*example.shape[:dim], *own, *example.shape[dim + 1 :])
        node.meta["example_value"] = example.new_empty(shape)
    return node


def of_vector(basis: Tensor) -> Tensor:
    """``basis`` without its first dimensions of size one: what it does to a vector that is
    broadcast."""
    basis = compact(basis)
    while rank(basis) > 1 and basis.shape[0] == 1:
        basis = basis[0]
    return basis


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
