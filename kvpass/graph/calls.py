"""Calls that rewrites add to a graph, with the example values that later stages look at, and calls
that they leave unread."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kvpass._torch import derived_source, is_sharded
from kvpass.graph.analysis.effects import written
from kvpass.graph.spellings import OPS, VIEWS, op_name
from kvpass.ops import logical


def add_call(graph: Graph, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
    """A call with its example value. ``target`` is a function or the name of a tensor's method."""
    if isinstance(target, str):
        node = graph.call_method(target, args, kwargs)
    else:
        node = graph.call_function(target, args, kwargs)
    node.meta["example_value"] = run_call(node)
    return node


def run_call(node: Node) -> Any:
    """What ``node`` makes of its arguments' example values."""
    args: Any = map_arg(node.args, lambda n: n.meta["example_value"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["example_value"])
    target: Any = node.target
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def four_dimensional(x: Node) -> Node:
    """``x`` with dimensions of size one in front, four in all."""
    missing = 4 - x.meta["example_value"].dim()
    return add_call(x.graph, operator.getitem, x, (None,) * missing) if missing else x


def add_argument(graph: Graph, name: str, example: Any) -> Node:
    """One more placeholder, behind the others, of what Dynamo does not know."""
    last = list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.meta["example_value"] = example
    derived_source(graph, node)
    return node


def erase_unread(node: Node) -> None:
    """Erases ``node`` if nothing reads it and it has no effect, then what only it had read.

    The graph's own dead-code elimination takes methods that write in place for pure ones.
    """
    if node._erased or node.users or node.op not in ("call_function", "call_method"):
        return
    # Appends to static caches have an effect.
    if node.target in logical.LOGICAL or _writes_to_others(node):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        erase_unread(source)


def _writes_to_others(node: Node) -> bool:
    """Whether ``node`` may write to anything but a new tensor that it alone reads."""
    targets = written(node, unknown=False)
    return targets != written(node) or any(
        list(target.users) != [node]
        or op_name(target) not in OPS.keys() - VIEWS
        or _writes_to_others(target)
        for target in targets
    )


def parameter_of(weight: Node) -> Node:
    """The argument that ``weight`` is this process's part of, as tensor parallelism has its
    weights; else ``weight``."""
    if weight.target == "to_local" and len(weight.args) == 1 and not weight.kwargs:
        source = weight.all_input_nodes[0]
        if source.op == "placeholder" and is_sharded(source.meta["example_value"]):
            return source
    return weight
