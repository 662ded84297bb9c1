"""Binds weights in other bases and constants, which become arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvpass._torch import mark_static_input
from kvpass.folding import Fold
from kvpass.graph.bases import constant_value, drop_constants, is_constant
from kvpass.graph.calls import add_argument, parameter_of
from kvpass.graph.logical_calls import WeightBasisCall
from kvpass.ops import logical


def bind_constants(
    graph: Graph, positions: dict[Node, int]
) -> tuple[tuple[Fold, ...], tuple[Tensor, ...], list[Any]]:
    """Makes arguments of permuted weights and of constants.

    Args:
        graph: with weights and constants as the rules left them.
        positions: of Dynamo's placeholders.

    Returns:
        Those, and example arguments for all of them.
    """
    folds: dict[Node, Fold] = {}
    shards: set[Node] = set()
    for node in graph.find_nodes(op="call_function", target=logical.rotate_weight):
        call = WeightBasisCall.at(node)
        parameter = parameter_of(call.weight)
        folds[node] = Fold(positions[parameter], constant_value(call.basis), call.dim)
        if parameter is not call.weight:
            shards.add(call.weight)
    examples = [_argument(node) for node in folds]
    for node in shards:
        if not node.users:
            graph.erase_node(node)
    used = [n for n in graph.find_nodes(op="get_attr") if is_constant(n) and n.users]
    constants = [on_device(constant_value(node), node.meta["device"]) for node in used]
    for node, constant in zip(used, constants, strict=True):
        if node.meta["example_value"] is constant_value(node):
            node.meta["example_value"] = constant
        _argument(node)
    drop_constants(graph)
    return tuple(folds.values()), tuple(constants), [*examples, *constants]


def on_device(constant: Tensor, device: torch.device) -> Tensor:
    """A constant where a graph reads it. (Only this touches the device while a graph is worked on:
    a dry run for a GPU that is not there puts a stand-in here.)"""
    return constant.to(device)


def _argument(node: Node) -> Any:
    """Puts an argument in the place of ``node``. Returns the example for it."""
    example = node.meta["example_value"]
    argument = add_argument(node.graph, f"kvpass_{node.name}", example)
    mark_static_input(argument)
    node.replace_all_uses_with(argument)
    node.graph.erase_node(node)
    return example
