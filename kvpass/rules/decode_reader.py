"""Readers that are part of no fused attention get the cache decoded."""

from __future__ import annotations

from torch.fx import Node

from kvpass.graph.analysis.sites import module_path, nearest_miss
from kvpass.graph.packed_readers import (
    decode_in_front,
    is_packed,
    replace_size,
    size_readers,
    unknown_readers,
)
from kvpass.graph.pattern import Captures, Miss, op_name
from kvpass.rules.base import Context, Rule, origin_of


class DecodeReader(Rule):
    """Decodes a packed tensor in front of readers that are part of no fused attention."""

    name = "decode_reader"
    identity = "f(packed)  =  f(unpack(packed))"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every packed tensor with such a reader."""
        if not is_packed(node) or not unknown_readers(node):
            return None
        cat = origin_of(node)
        sites = [s for s in context.sites.attentions if cat in (s.keys, s.values)]
        reasons = [str(site.miss) for site in sites if site.miss is not None]
        return {"reason": reasons[0] if reasons else str(nearest_miss(node, context.sites))}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        updates = context.sites.updates.values()
        unpacked = (u for u in updates if u.past is node and u.cat not in context.packed)
        if (update := next(unpacked, None)) is not None:
            context.warnings.append(
                f"the cache of {module_path(update.cat) or update.cat.name} goes back to "
                f"{8 * update.new.meta['example_value'].dtype.itemsize} bits: "
                f"{context.refused.get(update.cat, 'no rule applies')}"
            )
        readers = dict.fromkeys(op_name(reader) for reader in decode_in_front(node))
        return f"decoded in front of {', '.join(readers)}: {found['reason']}"


class ReadSize(Rule):
    """Computes what is asked of a packed tensor's size without the tensor."""

    name = "read_size"
    identity = "size(packed)  =  the symbols of the graph"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every packed tensor whose size is read."""
        readers = size_readers(node) if is_packed(node) else []
        return {"readers": readers} if readers else None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        for reader in found["readers"]:
            replace_size(reader)
        return "its size is computed from symbols"
