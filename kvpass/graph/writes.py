"""Which tensors a graph writes to in place, and when."""

from __future__ import annotations

import operator
from collections import defaultdict
from functools import cache
from inspect import signature
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import (
    is_higher_order,
    size_expr,
    storage_key,
    tree_leaves,
    written_arguments,
)
from kvpass.tensor.packed import PackedKV

_ASSIGNING = {operator.setitem}
_ASSIGNING |= {
    getattr(operator, name.strip("_"))
    for name in dir(operator)
    if name.startswith("__i") and name not in ("__index__", "__inv__", "__invert__")
}
_PURE_MODULES = ("_operator", "builtins", "kvpass", "math", "torch")


class Writes:
    """The in-place writes of one graph, as it was when this was made.

    Attributes:
        found: by memory: the writing nodes in order, with what they add to a number there, or None
            where that is not known.
    """

    def __init__(self, graph: Graph) -> None:
        self.found: dict[int, list[tuple[Node, sympy.Expr | None]]] = defaultdict(list)
        for node in graph.nodes:
            for target in written(node):
                if (key := memory(target)) is not None:
                    self.found[key].append((node, _added(node)))

    def to(self, node: Node) -> list[tuple[Node, sympy.Expr | None]]:
        """The writes to the memory of ``node``."""
        key = memory(node)
        return [] if key is None else self.found.get(key, [])


def memory(node: Any) -> int | None:
    """What tells the memory of the tensor ``node`` from others'; None if it is no plain tensor."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, Tensor) or isinstance(example, PackedKV):
        return None
    return storage_key(example)


def written(node: Node) -> list[Any]:
    """The arguments that ``node`` writes to. All of them where nothing says which."""
    target = node.target
    if node.op not in ("call_function", "call_method"):
        return list(node.all_input_nodes) if node.op == "call_module" else []
    first = list(node.args[:1])
    module = str(getattr(target, "__module__", None) or "torch")
    if module == "_operator":
        return first if target in _ASSIGNING else []
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return first
    if isinstance(target, str):
        return first if name.startswith("__i") or name == "__setitem__" else []
    if (keys := written_arguments(target)) is not None:
        passed: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        return tree_leaves([passed[key] for key in keys if key in passed])
    if is_higher_order(target) or module.split(".")[0] not in _PURE_MODULES:
        return list(node.all_input_nodes)
    if "out" in node.kwargs:
        return tree_leaves(node.kwargs["out"])
    return first if (index := _inplace(target)) is not None and _flag(node, index) else []


@cache
def _inplace(target: Any) -> int | None:
    """The position of the parameter ``inplace`` of ``target``, if it has one."""
    try:
        names = list(signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _flag(node: Node, index: int) -> bool:
    return bool(node.kwargs.get("inplace", node.args[index] if index < len(node.args) else False))


def _added(node: Node) -> sympy.Expr | None:
    """``n`` where ``node`` is ``x.add_(n)``."""
    if node.target != "add_" or len(node.args) != 2 or node.kwargs:
        return None
    number = node.args[1]
    if isinstance(number, Node):
        number = node_number(number)
    return size_expr(number) if isinstance(number, int | torch.SymInt) else None


def node_number(node: Node) -> int | torch.SymInt | None:
    """The number that ``node`` stands for; None if it is no int or SymInt."""
    example = node.meta.get("example_value")
    number = isinstance(example, int | torch.SymInt) and not isinstance(example, bool)
    return example if number else None
