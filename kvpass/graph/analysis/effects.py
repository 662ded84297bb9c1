"""What a graph changes in place: which nodes write, to what, and when."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from inspect import signature
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import is_higher_order, storage_key, tree_leaves, unbatched, written_arguments
from kvpass._torch_sizes import size_expr
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import VIEWS, op_name
from kvpass.tensor.packed import PackedKV

# The operators that assign; as methods they stand between underscores.
_ASSIGNING = {"iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"}
_ASSIGNING |= {"ipow", "irshift", "isub", "itruediv", "ixor", "setitem"}
_PURE_MODULES = ("_operator", "builtins", "kvpass", "math", "torch")


def written(node: Node, unknown: bool = True) -> list[Node]:
    """The arguments that ``node`` writes to.

    Args:
        node: of a graph.
        unknown: where nothing says what is written to, all arguments count; otherwise none do.
    """
    target = node.target
    every = node.all_input_nodes if unknown else []
    if node.op not in ("call_function", "call_method"):
        return every if node.op == "call_module" else []
    first = [*node.args[:1], node.kwargs.get("input")]
    is_method = isinstance(target, str)
    name = str(target if is_method else getattr(target, "__name__", ""))
    module = str(getattr(target, "__module__", None) or "torch")
    if is_method and name.startswith("__"):
        return _nodes(first) if name.strip("_") in _ASSIGNING else []
    if module == "_operator":
        return _nodes(first) if name in _ASSIGNING else []
    if name.endswith("_") and not name.endswith("__"):
        return _nodes(first)
    if (keys := written_arguments(target)) is not None:
        passed: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        return _nodes([passed[key] for key in keys if key in passed])
    known = module.split(".")[0] in _PURE_MODULES and not is_higher_order(target)
    if unknown and not known:
        return every
    if out := _nodes(node.kwargs.get("out")):
        return out
    return _nodes(first) if _inplace(node) else []


def mutates(node: Node) -> bool:
    """Whether ``node`` certainly changes a tensor in place."""
    return bool(written(node, unknown=False))


def _nodes(value: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]


def _inplace(node: Node) -> bool:
    """Whether the parameter ``inplace`` of the function is set."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    index = _inplace_position(node.target)
    return index is not None and index < len(node.args) and bool(node.args[index])


@cache
def _inplace_position(target: Any) -> int | None:
    try:
        names = list(signature(target).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


class Writes:
    """The in-place writes of one graph, as it was when this was made."""

    def __init__(self, graph: Graph) -> None:
        self._found: dict[int, list[tuple[Node, sympy.Expr | None]]] = defaultdict(list)
        # Else other tensors may get the memory of erased nodes.
        self._alive = [node.meta.get("example_value") for node in graph.nodes]
        for node in graph.nodes:
            for target in written(node):
                if (key := memory(target)) is not None:
                    self._found[key].append((node, _added(node)))

    def to(self, node: Node) -> list[tuple[Node, sympy.Expr | None]]:
        """The writes to the memory of ``node`` in order, with what each adds to a number there;
        None where that is not known."""
        key = memory(node)
        return [] if key is None else self._found.get(key, [])


def memory(node: Any) -> int | None:
    """Equal for plain tensors that share memory; None for all else."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(example, Tensor) or isinstance(example, PackedKV):
        return None
    return storage_key(unbatched(example))


def _added(node: Node) -> sympy.Expr | None:
    """``n`` where ``node`` is ``x.add_(n)``."""
    if node.target != "add_" or len(node.args) != 2 or node.kwargs:
        return None
    number = node_number(node.args[1])
    return None if number is None else size_expr(number)


def node_number(value: Any) -> int | torch.SymInt | None:
    """The number that ``value`` is or stands for as a node; None if it is no int or SymInt."""
    number = value.meta.get("example_value") if isinstance(value, Node) else value
    is_number = isinstance(number, int | torch.SymInt) and not isinstance(number, bool)
    return number if is_number else None


def is_int64(value: Any) -> bool:
    """Whether ``value`` is a node that stands for a tensor of int64."""
    example = value.meta.get("example_value") if isinstance(value, Node) else None
    return isinstance(example, Tensor) and example.dtype == torch.int64


def changed_storages(graph: Graph) -> set[Node]:
    """The nodes that write in place, and those that share memory with what is written to."""
    writers = {node: written(node, unknown=False) for node in graph.nodes}
    changed = {memory(target) for targets in writers.values() for target in targets} - {None}
    return {node for node, targets in writers.items() if targets or memory(node) in changed}


def changes(node: Node) -> list[Node]:
    """What changes ``node`` in place, itself or a view of it."""
    views = [node, *(user for user in node.users if _is_view(user, node))]
    return [user for x in views for user in x.users if x in written(user, unknown=False)]


def _is_view(user: Node, node: Node) -> bool:
    """Whether ``user`` may share the storage of ``node``: a cast to another dtype does not."""
    dtypes = [getattr(n.meta.get("example_value"), "dtype", None) for n in (user, node)]
    return op_name(user) in VIEWS and (None in dtypes or dtypes[0] == dtypes[1])


def disturbance(found: Captures, root: Node) -> Miss | None:
    """A change in place, between one of the reads of the attention and its end, of what it
    reads."""
    steps = [step.node for name in found if name.endswith("_steps") for step in found[name]]
    inner = [found[name] for name in ("product", "softmax") if name in found]
    for reader in [*steps, *inner, root]:
        for source in reader.all_input_nodes:
            if source in written(reader, unknown=False) and len(source.users) > 1:
                return Miss(f"{source.name} is changed in place and read elsewhere", reader)
            for change in changes(source):
                if change is not reader and reader < change < root:
                    return Miss(f"{source.name} is changed in place", change)
    return None
