"""Attention over a packed cache becomes ``kvpass.attention``."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from kvpass._torch_sizes import symbol_positions
from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.analysis.scores import MaskStep
from kvpass.graph.analysis.static import StaticUpdate
from kvpass.graph.calls import add_call, erase_unread, four_dimensional
from kvpass.graph.logical_calls import AttentionCall
from kvpass.graph.packed_readers import unknown_readers
from kvpass.graph.pattern import Captures, Miss
from kvpass.rules.base import Context, Rule


# Where K and V are packed, and repeat() is any or no repetition of KV heads for the query heads
# sharing them. `kvpass.graph.analysis.scores` brings other scores into this form, with a soft cap
# and sinks beside the mask.
class FuseAttention(Rule):
    """Reads packed keys and values without decoding them first."""

    name = "fuse_attention"
    identity = (
        "sdpa(q, repeat(K), repeat(V), mask, scale)  =  attention(q, K, V, mask, scale)\n"
        "softmax(q @ repeat(K)^T * scale + mask) @ repeat(V)  =  attention(q, K, V, mask, scale)"
    )

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to known attentions whose keys and values are read packed."""
        site = context.sites.attention(node)
        if site is None:
            return None
        keys, values = (context.packed.get(cat) for cat in (site.keys, site.values))
        if keys is None or values is None or not unknown_readers(keys):
            # In a prefill what is packed is returned, and nothing reads it.
            return None
        if site.miss is not None:
            return site.miss
        if site.causal and site.q.meta["example_value"].shape[-2] != 1:
            # torch's is_causal aligns the triangle top left, which hides the past.
            return Miss("is_causal with a filled cache and several new tokens", node)
        hidden_by, counted_by = None, None
        static = context.sites.static(site.keys)
        if static is not None and static.positions is not None:
            hidden_by, counted_by = _hider(site, static, context)
            if hidden_by is None:
                return Miss("the mask is not known to hide what is not written yet", node)
        by = {"hidden_by": hidden_by, "counted_by": counted_by}
        return {"site": site, "keys": keys, "values": values, **by}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        site: AttentionSite = found["site"]
        with context.graph.inserting_before(node):
            fused = attention_call(context.graph, site, found["keys"], found["values"])
        fused.meta = {**node.meta}
        hidden_by = found["hidden_by"]
        if hidden_by is not None and hidden_by.op == "placeholder":
            # Data: looked at when the graph is called.
            fused.meta["hidden_by"] = hidden_by
        fused.meta["counted_by"] = found["counted_by"]
        out = fused
        if node.meta["example_value"].dim() == 3:
            with context.graph.inserting_after(fused):
                out = context.graph.call_method("flatten", (fused, 0, 1))
            out.meta = {**node.meta}
            fused.meta["example_value"] = node.meta["example_value"].unflatten(0, (-1, site.heads))
        node.replace_all_uses_with(out)
        sites = context.sites.attentions
        sites[:] = [other.renamed(node, out) if other is not site else site for other in sites]
        erase_unread(node)
        masked = site.mask is not None or site.mask_steps
        extra = f", softcap {site.softcap:g}" if site.softcap else ""
        extra += ", sinks" if site.sinks is not None else ""
        mask = "mask tensor" if masked else "no mask"
        return f"{site.form} attention, {mask}, scale {site.scale:g}{extra}"


def _hider(
    site: AttentionSite, static: StaticUpdate, context: Context
) -> tuple[Node | None, int | None]:
    """The mask that hides what is not written yet of a static cache: provably, or data; and the
    argument that must be the number of written tokens for that, if one must."""
    steps = [s.by for s in site.mask_steps if s.kind in ("add", "show")]
    for mask in [site.mask, *steps]:
        if mask is None:
            continue
        data = mask.op == "placeholder" and mask.meta["example_value"].shape[-1] == static.room
        assert static.positions is not None
        if data or context.masks.hides_unwritten(mask, static.positions):
            return mask, None
        # Masks are made from a number on the host, positions from one on the device.
        for symbol, argument in symbol_positions(context.graph).items():
            if context.masks.hides_unwritten(mask, static.positions, symbol):
                return mask, argument
    return None, None


def attention_call(graph: Graph, site: AttentionSite, keys: Node, values: Node) -> Node:
    """The attention ``site`` over ``keys`` and ``values``, where nodes are inserted now."""
    q, sinks = site.q, site.sinks
    if q.meta["example_value"].dim() == 3:
        q = add_call(graph, torch.unflatten, q, 0, (-1, site.heads))
    if sinks is not None:
        sinks = add_call(graph, torch.flatten, sinks)
    mask = site.mask if site.mask is not None else _mask(graph, site)
    call = AttentionCall(q, keys, values, mask, site.scale, sinks, softcap=site.softcap)
    return call.insert(graph)


def _mask(graph: Graph, site: AttentionSite) -> Node | None:
    """The mask that ``site.mask_steps`` make; additive, or bool where that says the same."""
    mask: Node | None = None
    for step in site.mask_steps:
        if step.kind == "mul" and mask is not None:
            mask = add_call(graph, operator.mul, mask, step.fill)
        elif step.kind == "floor" and mask is not None:
            mask = add_call(graph, torch.clamp, mask, step.fill)
        elif step.by is not None:
            if step.joined:
                by = add_call(graph, torch.unflatten, step.by, 0, (-1, site.heads))
            else:
                by = four_dimensional(step.by)
            mask = _masked(graph, mask, by, step, alone=len(site.mask_steps) == 1)
    return mask


def _masked(graph: Graph, mask: Node | None, by: Node, step: MaskStep, alone: bool) -> Node:
    """``mask`` (zeros if None) with ``by`` added, or hidden or shown where it says so."""
    if step.kind == "add":
        return by if mask is None else add_call(graph, operator.add, mask, by)
    if alone and step.fill == -torch.inf:
        # Rows that are hidden as a whole are NaN in either form.
        return by if step.kind == "show" else add_call(graph, torch.logical_not, by)
    if mask is None:
        mask = add_call(graph, "new_zeros", by, (), dtype=step.dtype)
    elif mask.meta["example_value"].dtype != step.dtype:
        mask = add_call(graph, "to", mask, step.dtype)
    low = add_call(graph, "new_full", by, (), step.fill, dtype=step.dtype)
    shown = (mask, low) if step.kind == "show" else (low, mask)
    return add_call(graph, torch.where, by, *shown)
