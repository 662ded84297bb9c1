"""Readers that are part of no fused attention get the cache decoded."""

from __future__ import annotations

from torch.fx import Node

from kvpass.graph.packed_readers import decode_in_front, is_packed, unknown_readers
from kvpass.graph.pattern import Captures, Miss, op_name
from kvpass.graph.sites import nearest_miss
from kvpass.rules.base import Context, Rule


# f(packed)  =  f(unpack(packed))
class DecodeReader(Rule):
    """Decodes a packed tensor in front of readers that are part of no fused attention."""

    name = "decode_reader"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every packed tensor with such a reader."""
        if not is_packed(node) or not unknown_readers(node):
            return None
        cat = next((c for c, packed in context.packed.items() if packed is node), None)
        sites = [s for s in context.sites.attentions if cat in (s.keys, s.values)]
        reasons = [str(site.miss) for site in sites if site.miss is not None]
        return {"reason": reasons[0] if reasons else str(nearest_miss(node, context.sites))}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        readers = dict.fromkeys(op_name(reader) for reader in decode_in_front(node))
        return f"decoded in front of {', '.join(readers)}: {found['reason']}"
