"""Permutations of channels, and arithmetic channel by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graph.analysis.scores import number
from kvpass.graph.calls import run_call
from kvpass.graph.logical_calls import PermuteWeightCall
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.rules.permutation.base import (
    Moved,
    changed_miss,
    folded,
    moved_down,
    moved_up,
    operands,
    replace_argument,
    shape_of,
    vector_index,
    weight_miss,
)

_BINARY = {"add", "div", "mul", "sub"}


# P(f(x)) = f(P(x)),  where f does the same to every channel: casts, copies, x * 2
def elementwise_up(x: Node, index: Tensor) -> Moved:
    """Moves through what does the same to every channel."""
    source = _operand(x)
    return moved_up(x, source, index) if isinstance(source, Node) else source


def elementwise_down(reader: Node, permute: Node, index: Tensor) -> Moved:
    """Moves behind what does the same to every channel."""
    source = _operand(reader)
    return moved_down(reader, permute, index) if isinstance(source, Node) else source


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


# P(x * r) = P(x) * r,     where r is the same for all channels
# P(x * w) = P(x) * P(w),  where w is a parameter
def scaled_up(x: Node, index: Tensor) -> Moved:
    """Moves through a factor (or term) per token or head, or one per channel that is a parameter:
    the two halves of a norm."""
    pair = operands(x) if op_name(x) in _BINARY else ()
    if len(pair) != 2 or not all(isinstance(value, Node) for value in pair):
        return None
    if pair[0] is pair[1]:
        return Miss("it is multiplied with itself", x)
    wide = [n for n in pair if _channels(n) != 1 and not _is_vector(n)]
    if len(wide) != 1 or len(shape_of(wide[0])) != index.dim():
        return Miss("what it is multiplied with is neither a parameter nor per token", x)
    if miss := changed_miss(wide[0]):
        return miss
    for name, value in zip(("input", "other"), pair, strict=True):
        if value is not wide[0] and _channels(value) != 1:
            replace_argument(x, name, value, _vector_permuted(value, vector_index(index)))
    return moved_up(x, wide[0], index)


def _channels(node: Node) -> Any:
    shape = shape_of(node)
    return shape[-1] if len(shape) else 1


def _is_vector(node: Node) -> bool:
    """Whether ``node`` is computed from a parameter ``[D]`` alone, maybe a permuted one."""
    while isinstance(source := _operand(node), Node):
        node = source
    call = PermuteWeightCall.of(node)
    vector = node if call is None else call.weight
    return weight_miss(node, 0) is None and len(shape_of(vector)) == 1


def _vector_permuted(node: Node, index: Tensor) -> Node:
    """What ``node``, for which `_is_vector` holds, is of its parameter permuted by ``index``."""
    source = _operand(node)
    if not isinstance(source, Node):
        return folded(node, index)
    inner = _vector_permuted(source, index)
    with node.graph.inserting_after(max(inner, node)):
        new = node.graph.node_copy(node, lambda n: inner if n is source else n)
    with torch.no_grad():
        new.meta = {**node.meta, "example_value": run_call(new)}
    return new
