"""Linear layers of the same few tokens, such as those of query, key and value, are one op."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from kvpass.graph.pattern import Captures
from kvpass.rules.base import Context, Rule

_ONE = torch.ops.kvpass.linear.default
_JOINED = torch.ops.kvpass.linears.default


class JoinLinears(Rule):
    """Lets one op compute linear layers of the same tokens: it starts threads once, and none of
    them waits for the others between two layers. Applies to bound graphs."""

    name = "join_linears"
    identity = "linear(x, a); linear(x, b)  =  linears(x, [a, b])"
    required = False

    def match(self, node: Node, context: Context) -> Captures | None:
        """Applies to the first of several layers, with those whose weights are there before it."""
        if node.target is not _ONE:
            return None
        x: Any = node.args[0]
        alike = sorted(n for n in x.users if n.target is _ONE and n.args[0] is x)
        if node is not alike[0]:
            return None
        layers = [n for n in alike if all(read < node for read in n.all_input_nodes)]
        read = {argument for layer in layers for argument in layer.all_input_nodes}
        if len(layers) < 2 or not context.changed.isdisjoint(read):
            return None
        arguments = _arguments(layers)
        if context.provider_of(node, _JOINED, arguments) == "aten":
            return None
        return {"layers": layers, "arguments": arguments}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        graph, layers = context.graph, found["layers"]
        with graph.inserting_before(node):
            joined = graph.call_function(_JOINED, found["arguments"])
            parts = [graph.call_function(operator.getitem, (joined, i)) for i in range(len(layers))]
        joined.meta = {**node.meta, "example_value": [n.meta["example_value"] for n in layers]}
        for layer, part in zip(layers, parts, strict=True):
            part.meta = dict(layer.meta)
            layer.replace_all_uses_with(part)
            graph.erase_node(layer)
        return f"one op computes {len(layers)} layers of the same tokens"


def _arguments(layers: list[Node]) -> tuple[Any, ...]:
    """Arguments of the op that computes all these."""
    x, *parts = zip(*((*n.args, None, None)[:4] for n in layers), strict=True)
    return (x[0], *map(list, parts))
