"""The arithmetic in an attention's mask becomes bounds that kernels skip by."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

import torch
from torch.fx import Node

from kvpass.graph.analysis.masks import Bounds
from kvpass.graph.calls import add_call, erase_unread, four_dimensional
from kvpass.graph.logical_calls import AttentionCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.rules.base import Context, Rule, origin_of


# Where mask = causal(i, j) & in_window(i, j) & rest, as `graph.analysis.masks` proves, or the
# mask is added: 0 there, the smallest number or -inf elsewhere. With that number both sides
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
            parts = []
            for node, negated in bounds.rest:
                part = four_dimensional(node)
                parts.append(add_call(part.graph, torch.logical_not, part) if negated else part)
            built[key] = reduce(partial(add_call, context.graph, torch.logical_and), parts)
    return built.get(key)
