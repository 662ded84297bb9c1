"""Positions that count from the length of a cache read it on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kvpass._torch_sizes import same_size
from kvpass.graph.analysis.effects import is_int64, node_number
from kvpass.graph.logical_calls import PackedCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule
from kvpass.tensor.packed import PackedKV


# Where steps are replayed: they repeat the numbers of the host with which they were recorded.
class PositionOnDevice(Rule):
    """Adds the length of the cache from the device, not as a number of the host."""

    name = "position_on_device"
    identity = "steps + size(past)  =  steps + length(past)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to sums of a tensor of integers and the number of tokens in a growing cache."""
        if not context.replayed:
            return None
        if op_name(node) != "add" or len(node.args) != 2 or node.kwargs:
            return None
        for steps, size in (node.args, node.args[::-1]):
            past = _cache_of(size, context)
            if past is not None and is_int64(steps):
                return {"steps": steps, "past": past}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        past, graph = found["past"], context.graph
        known = [user for user in past.users if user.target is logical.length]
        if known:
            length = known[0]
        else:
            # Before anything is appended.
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                length = PackedCall(past).insert(graph, logical.length)
            length.meta["example_value"] = logical.length(past.meta["example_value"])
        node.args = (found["steps"], length)
        return f"the length of {past.name} is read on the device"


def _cache_of(size: Any, context: Context) -> Node | None:
    """A cache argument that holds as many tokens as the node ``size`` says, all of them."""
    number = node_number(size) if isinstance(size, Node) else None
    if not isinstance(number, torch.SymInt):
        return None
    arguments: list[Node] = list(context.graph.find_nodes(op="placeholder"))
    for node in arguments:
        example = node.meta.get("example_value")
        # What slides does not hold all that have come.
        if not isinstance(example, PackedKV) or example.plan.window_size is not None:
            continue
        if same_size(example.shape[2], number):
            return node
    return None
