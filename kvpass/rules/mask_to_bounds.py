"""The arithmetic in an attention's mask becomes bounds that kernels skip by."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from kvpass.graph.analysis.indices import operation
from kvpass.graph.analysis.masks import Bounds
from kvpass.graph.calls import add_call, four_dimensional
from kvpass.graph.logical_calls import AttentionCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.writes import written
from kvpass.rules.base import Context, Rule, origin_of


# Where mask = causal(i, j) & in_window(i, j) & rest, as `graph.analysis.masks` proves, or the
# mask is added: 0 there, the least number or -inf elsewhere. With the least number both sides
# differ in rows that hide every token, so such a mask is rewritten only if every query sees itself.
# Scores are taken to be small against that number.
class MaskToBounds(Rule):
    """Leaves of a mask what is no bound: nothing, or the padding."""

    name = "mask_to_bounds"
    identity = "attention(q, K, V, mask)  =  attention(q, K, V, rest, causal, window)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every attention over a packed cache with a mask that is partly understood."""
        call = AttentionCall.of(node)
        if call is None or call.mask is None:
            return None
        buffer = origin_of(call.keys)
        static = None if buffer is None else context.sites.static(buffer)
        bounds = context.masks.bounds(call.mask, call.q, static.positions if static else None)
        return bounds if isinstance(bounds, Miss) else {"call": call, "bounds": bounds}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        call, bounds = found["call"], found["bounds"]
        assert not call.causal
        assert not call.window
        rest = _rest(call.mask, bounds, context)
        replace(call, mask=rest, causal=bounds.causal, window=bounds.window).write(node)
        erase_unread(call.mask)
        said = ["causal"] * bounds.causal + [f"window {bounds.window}"] * (bounds.window > 0)
        said += ["a mask of the rest"] if bounds.rest else [] if said else ["all is visible"]
        return ", ".join(said)


def _rest(mask: Node, bounds: Bounds, context: Context) -> Node | None:
    """The tensor that is left of ``mask``, the same node for all layers."""
    built = context.masks.built
    key = (mask, bounds.rest)
    if bounds.rest and key not in built:
        with context.graph.inserting_before(mask.next):
            parts = [_part(part, negated) for part, negated in bounds.rest]
            whole = parts[0]
            for part in parts[1:]:
                whole = add_call(context.graph, torch.logical_and, whole, part)
        built[key] = whole
    return built.get(key)


def _part(node: Node, negated: bool) -> Node:
    """``node``, or its complement, with four dimensions."""
    node = four_dimensional(node)
    return add_call(node.graph, torch.logical_not, node) if negated else node


def erase_unread(node: Node) -> None:
    """Erases ``node`` if nothing reads it, then what only it had read, up to what is no part of a
    mask's arithmetic."""
    if node._erased or node.users or operation(node) is None or written(node):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        erase_unread(source)
