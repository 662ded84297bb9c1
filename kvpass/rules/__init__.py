"""The rewrite rules, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from kvpass.graph.analysis.sites import find_sites, module_path
from kvpass.graph.pattern import Miss
from kvpass.rules.base import Context as Context
from kvpass.rules.base import Event as Event
from kvpass.rules.base import Rule as Rule
from kvpass.rules.basis.push_basis import BasisLeft, PushBasis, ShareTables
from kvpass.rules.basis.rotate_channels import CancelRotations, RotateChannels
from kvpass.rules.cache_before_rope import CacheBeforeRope
from kvpass.rules.decode_reader import DecodeReader, ReadSize
from kvpass.rules.few_token_linear import FewTokenLinear
from kvpass.rules.fuse_append_attention import FuseAppendAttention
from kvpass.rules.fuse_attention import FuseAttention
from kvpass.rules.fuse_rope_append import FuseRopeAppend
from kvpass.rules.join_linears import JoinLinears
from kvpass.rules.mask_to_bounds import MaskToBounds
from kvpass.rules.padding_as_given import PaddingAsGiven
from kvpass.rules.position_on_device import PositionOnDevice
from kvpass.rules.quantize_cache import QuantizeCache
from kvpass.rules.quantize_static import QuantizeStatic
from kvpass.rules.reorder_chunks import ReorderChunks
from kvpass.rules.rotate_before import RotateBefore
from kvpass.rules.share_heads import ShareHeads

RULES: list[Rule] = [
    QuantizeStatic(),
    QuantizeCache(),
    CacheBeforeRope(),
    FuseAttention(),
    MaskToBounds(),
    PaddingAsGiven(),
    DecodeReader(),
    ShareHeads(),
    RotateChannels(),
    PushBasis(),
    CancelRotations(),
    ShareTables(),
    FuseRopeAppend(),
    BasisLeft(),
    ReorderChunks(),
    PositionOnDevice(),
]
# Whatever other rules there are, these leave no packed tensor to who cannot read it.
DECODING: list[Rule] = [DecodeReader(), ReadSize()]
# Tried on the bound graph.
BOUND_RULES: list[Rule] = [RotateBefore(), FuseAppendAttention(), FewTokenLinear(), JoinLinears()]


def register_rule(cls: type[Rule]) -> type[Rule]:
    """Class decorator: the rule is tried on every graph, before the built-in ones."""
    RULES[:] = [cls(), *(rule for rule in RULES if rule.name != cls.name)]
    return cls


def apply_rules(context: Context, rules: Sequence[Rule] | None = None) -> list[Event]:
    """Tries every rule (of `RULES` by default) at every node, rule by rule. Returns what fired and
    what was refused."""
    events, names = [], _names(context)
    for rule in list(RULES if rules is None else rules):
        for node in list(context.graph.nodes):
            if node._erased:
                continue
            found = rule.match(node, context)
            if found is None:
                continue
            name, path = node.name, module_path(node)
            if isinstance(found, Miss):
                event = Event(rule.name, name, path, False, str(found), rule.required)
                events.append(event)
                context.refused.setdefault(node, str(found))
            else:
                detail = rule.rewrite(node, found, context)
                before, names = names, _names(context)
                changes = {"erased": before - names, "wrote": names - before}
                event = Event(rule.name, name, path, True, detail, True, rule.identity, **changes)
                events.append(event)
        fired = any(e.rule == rule.name and e.fired for e in events)
        if rules is None and fired and not context.packed:
            # A rule that came first may have brought the graph into a known form.
            context.sites = find_sites(context.graph)
    return events


def _names(context: Context) -> frozenset[str]:
    return frozenset(node.name for node in context.graph.nodes)
