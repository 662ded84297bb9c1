"""Bases of channels, and arithmetic channel by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graph.analysis.scores import number
from kvpass.graph.bases import is_rotation, rank
from kvpass.graph.calls import run_call
from kvpass.graph.logical_calls import WeightBasisCall
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.rules.basis.base import (
    Moved,
    changed_miss,
    folded,
    moved_down,
    moved_up,
    of_vector,
    operands,
    replace_argument,
    shape_of,
    weight_miss,
)

_BINARY = {"add", "div", "mul", "sub"}


# P(f(x)) = f(P(x)),  where f does the same to every channel: casts, copies, x * 2, x + 2
# R(f(x)) = f(R(x)),  where f is linear as well, as all of these are but the last
def elementwise_up(x: Node, basis: Tensor) -> Moved:
    """Moves through what does the same to every channel."""
    source = _operand(x)
    if not isinstance(source, Node):
        return source
    return _linear_miss(x, source, basis) or moved_up(x, source, basis)


def elementwise_down(reader: Node, rotate: Node, basis: Tensor) -> Moved:
    """Moves behind what does the same to every channel."""
    source = _operand(reader)
    if not isinstance(source, Node):
        return source
    return _linear_miss(reader, source, basis) or moved_down(reader, rotate, basis)


def _linear_miss(node: Node, x: Node, basis: Tensor) -> Miss | None:
    """Why a rotation of ``x`` does not pass ``node``, which reads it: it is not linear."""
    name = op_name(node)
    if not is_rotation(basis) or name not in _BINARY or name == "mul":
        return None
    if name == "div" and operands(node)[0] is x:
        return None
    return Miss(f"{name} is not linear in the channels that are rotated", node)


def _operand(node: Node) -> Node | Miss | None:
    """``x`` if ``node`` does the same to every channel of ``x``; else why not, or None."""
    name = op_name(node)
    if name == "dropout" and argument(node, "training") is not False and argument(node, "p") != 0:
        return Miss("dropout chooses channels", node)
    if name in _BINARY:
        if sum(number(value) is None for value in operands(node)) != 1:
            return None
    elif name not in ("contiguous", "dropout", "neg", "to"):
        return None
    return node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None


# R(x * r) = R(x) * r,     where r is the same for all channels
# P(x * w) = P(x) * P(w),  where w is a parameter
def scaled_up(x: Node, basis: Tensor) -> Moved:
    """Moves through a factor (or term) per token or head, or one per channel that is a parameter:
    the two halves of a norm."""
    pair = operands(x) if op_name(x) in _BINARY else ()
    if len(pair) != 2 or not all(isinstance(value, Node) for value in pair):
        return None
    if pair[0] is pair[1]:
        return Miss("it is multiplied with itself", x)
    wide = [n for n in pair if _channels(n) != 1 and not _is_vector(n)]
    if len(wide) != 1 or len(shape_of(wide[0])) != rank(basis):
        return Miss("what it is multiplied with is neither a parameter nor per token", x)
    if miss := _linear_miss(x, wide[0], basis):
        return miss
    if is_rotation(basis) and any(_channels(n) != 1 for n in pair if n is not wide[0]):
        return Miss("each channel has a factor of its own", x)
    if miss := changed_miss(wide[0]):
        return miss
    for name, value in zip(("input", "other"), pair, strict=True):
        if value is not wide[0] and _channels(value) != 1:
            replace_argument(x, name, value, _vector_permuted(value, of_vector(basis)))
    return moved_up(x, wide[0], basis)


def _channels(node: Node) -> Any:
    shape = shape_of(node)
    return shape[-1] if len(shape) else 1


def _is_vector(node: Node) -> bool:
    """Whether ``node`` is computed from a parameter ``[D]`` alone, maybe a permuted one."""
    while isinstance(source := _operand(node), Node):
        node = source
    call = WeightBasisCall.of(node)
    vector = node if call is None else call.weight
    return weight_miss(node, 0) is None and len(shape_of(vector)) == 1


def _vector_permuted(node: Node, basis: Tensor) -> Node:
    """What ``node``, for which `_is_vector` holds, is of its parameter permuted by ``basis``."""
    source = _operand(node)
    if not isinstance(source, Node):
        return folded(node, basis)
    inner = _vector_permuted(source, basis)
    with node.graph.inserting_after(max(inner, node)):
        new = node.graph.node_copy(node, lambda n: inner if n is source else n)
    with torch.no_grad():
        new.meta = {**node.meta, "example_value": run_call(new)}
    return new
