"""Permutations of channels, and arithmetic channel by channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.graph.analysis.scores import number
from kvpass.graph.calls import run_call
from kvpass.graph.orders import permuted
from kvpass.graph.pattern import Miss, argument, op_name
from kvpass.rules.permutation.base import (
    Moved,
    PushDown,
    PushUp,
    changed_miss,
    dim_miss,
    folded,
    operands,
    replace_argument,
    shape_of,
    vector_index,
)
from kvpass.rules.permutation.views import sunk

_BINARY = {"add", "div", "mul", "sub"}


# P(f(x)) = f(P(x)),  where f does the same to every channel: casts, copies, x * 2
class Elementwise(PushUp, PushDown):
    """Through what does the same to every channel."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        source = _operand(x)
        if not isinstance(source, Node):
            return source
        if miss := changed_miss(source):
            return miss
        moved = permuted(source, index)
        x.replace_input_with(source, moved)
        return [] if moved is source else [moved]

    def down(self, reader: Node, permute: Node, index: Tensor) -> Moved:
        """See `PushDown.down`."""
        source = _operand(reader)
        return sunk(reader, permute, index) if isinstance(source, Node) else source


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
    if len(node.all_input_nodes) != 1:
        return None
    return node.all_input_nodes[0]


# P(x * r) = P(x) * r,     where r is the same for all channels
# P(x * w) = P(x) * P(w),  where w is a parameter
class Scaled(PushUp):
    """Through a factor (or term) per token or head, or one per channel that is a parameter:
    the two halves of a norm."""

    def up(self, x: Node, index: Tensor) -> Moved:
        """See `PushUp.up`."""
        pair = operands(x) if op_name(x) in _BINARY else ()
        if len(pair) != 2 or not all(isinstance(value, Node) for value in pair):
            return None
        left, right = pair
        if left is right:
            return Miss("it is multiplied with itself", x)
        wide = [n for n in pair if _channels(n) != 1 and vector_miss(n) is not None]
        if len(wide) != 1 or len(shape_of(wide[0])) != index.dim():
            return Miss("what it is multiplied with is neither a parameter nor per token", x)
        if miss := changed_miss(wide[0]):
            return miss
        for name, value in (("input", left), ("other", right)):
            if value is not wide[0] and _channels(value) != 1:
                replace_argument(x, name, value, vector_permuted(value, vector_index(index)))
        moved = permuted(wide[0], index)
        x.replace_input_with(wide[0], moved)
        return [] if moved is wide[0] else [moved]


def _channels(node: Node) -> Any:
    shape = shape_of(node)
    return shape[-1] if len(shape) else 1


def vector_miss(node: Node) -> Miss | None:
    """Why ``node`` is no vector computed from a parameter alone, or None if it is."""
    if len(shape_of(node)) != 1 and not _is_folded(node):
        return Miss("it is no vector", node)
    source = _operand(node)
    return vector_miss(source) if isinstance(source, Node) else dim_miss(node, 0)


def _is_folded(node: Node) -> bool:
    source = _operand(node)
    return _is_folded(source) if isinstance(source, Node) else dim_miss(node, 0) is None


def vector_permuted(node: Node, index: Tensor) -> Node:
    """What ``node``, for which `vector_miss` is None, is of its parameter permuted by ``index``."""
    source = _operand(node)
    if not isinstance(source, Node):
        return folded(node, index)
    inner = vector_permuted(source, index)
    with node.graph.inserting_after(max(inner, node)):
        new = node.graph.node_copy(node, lambda n: inner if n is source else n)
    with torch.no_grad():
        new.meta = {**node.meta, "example_value": run_call(new)}
    return new
