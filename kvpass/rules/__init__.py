"""The rewrite rules, in the order in which they are tried."""

from __future__ import annotations

from kvpass.graph.pattern import Miss
from kvpass.graph.sites import find_sites, module_path
from kvpass.rules.base import Context as Context
from kvpass.rules.base import Event as Event
from kvpass.rules.base import Rule as Rule
from kvpass.rules.cache_before_rope import CacheBeforeRope
from kvpass.rules.decode_reader import DecodeReader
from kvpass.rules.fuse_attention import FuseAttention
from kvpass.rules.fuse_rope_append import FuseRopeAppend
from kvpass.rules.mask_to_bounds import MaskToBounds
from kvpass.rules.permute_channels import PermuteChannels
from kvpass.rules.push_order import ChannelGather, PushOrder, ShareTables
from kvpass.rules.quantize_cache import QuantizeCache
from kvpass.rules.quantize_static import QuantizeStatic
from kvpass.rules.reorder_chunks import ReorderChunks
from kvpass.rules.share_heads import ShareHeads

RULES: list[Rule] = [
    QuantizeStatic(),  # index_copy_(buffer, new)  ~  append(buffer, new), lossy as the next one
    QuantizeCache(),  # cat([past, new])  ~  append(past, new), the one lossy rule
    CacheBeforeRope(),  # append(past, rope(x))  =  append'(past, x), which turns x when it is read
    FuseAttention(),  # attention over a packed cache  =  kvpass.attention
    MaskToBounds(),  # attention with a mask  =  attention with bounds and a simpler mask
    DecodeReader(),  # f(packed)  =  f(unpack(packed))
    ShareHeads(),  # sdpa(q, repeat(K), repeat(V))  =  sdpa(q, K, V, enable_gqa=True)
    PermuteChannels(),  # attention(q, K, V)  =  Pv^-1(attention(Pk(q), Pk(K), Pv(V)))
    PushOrder(),  # P(f(x))  =  f(P(x)), and back, until a linear layer's weight takes P up
    ShareTables(),  # P(t)  =  P'(t)[:, ::g], for cosines and sines
    FuseRopeAppend(),  # append(past, rope(x))  =  append(past, x, rope), in one kernel
    ChannelGather(),  # (says which permutations stay)
    ReorderChunks(),  # attention(q, K, V, mask)  =  attention(q, P(K), P(V), P(mask))
]


def register_rule(cls: type[Rule]) -> type[Rule]:
    """Class decorator: the rule is tried on every graph, before the built-in ones."""
    RULES[:] = [cls(), *(rule for rule in RULES if rule.name != cls.name)]
    return cls


def apply_rules(context: Context) -> list[Event]:
    """Tries every rule at every node, rule by rule. Returns what fired and what was refused."""
    events = []
    for rule in list(RULES):
        for node in list(context.graph.nodes):
            if node._erased:
                continue
            found = rule.match(node, context)
            if found is None:
                continue
            name, path = node.name, module_path(node)
            if isinstance(found, Miss):
                events.append(Event(rule.name, name, path, False, str(found), rule.required))
            else:
                detail = rule.rewrite(node, found, context)
                events.append(Event(rule.name, name, path, True, detail))
        if not context.packed and any(e.rule == rule.name and e.fired for e in events):
            # A rule that came first may have brought the graph into a known form.
            context.sites = find_sites(context.graph)
    return events
