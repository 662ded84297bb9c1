"""Calls that rewrites add to a graph, with the example values that later stages look at."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


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
