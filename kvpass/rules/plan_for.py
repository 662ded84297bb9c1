"""How a cache tensor that is still empty is to be stored."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvpass.errors import PlanError
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.sites import module_path
from kvpass.graph.pattern import Miss
from kvpass.rules.base import Context
from kvpass.rules.cache_before_rope import RopeMatch, rope_match


def changed_later(new: Node, update: Node, context: Context) -> Miss | None:
    """A change in place of what is to be appended, after ``update`` has copied it: the append comes
    later than that."""
    later = [write for write, _ in context.writes.to(new) if write > update and write is not update]
    return Miss(f"{new.name} is changed in place after it was cached", later[0]) if later else None


def pre_rope(new: Node, update: Node, context: Context) -> RopeMatch | Miss | None:
    """The rotary embedding of the keys ``new``, whose input can be cached in their place; None if
    they have none."""
    found = rope_match(new)
    for part in found.parts if isinstance(found, RopeMatch) else ():
        if miss := changed_later(part, update, context):
            return miss
    return found


def plan_for(new: Node, read: Node, context: Context) -> tuple[str, TensorPlan] | Miss:
    """The role of a cache tensor, and the plan that the recipe makes for it; the order of its
    channels goes into ``context.orders``, calibrated ranges into ``context.ranges``.

    Args:
        new: what is to be appended.
        read: what attention reads: a cat, or a static cache's buffer.

    Raises:
        PlanError: if the recipe does not fit known keys or values.
    """
    role, site = context.sites.roles.get(read, ("unknown", None))
    if site is not None and role != "unknown":
        k, v = (node.meta["example_value"] for node in (site.keys, site.values))
        heads = (site.heads, int(k.shape[1]))
        layer = context.layer_plan(site.path, int(k.shape[3]), int(v.shape[3]), heads)
        order = layer.key_order if role == "keys" else layer.value_order
        if order is not None:
            context.orders[read] = order
        if role == "values":
            return role, layer.values
        if context.sites.static(read) and (layer.before_rope or layer.keys.codec.static_ranges):
            return Miss("a static cache takes no calibrated keys, and none before RoPE", read)
        if layer.key_ranges is not None:
            context.ranges[read] = layer.key_ranges
        found = pre_rope(new, read, context) if layer.before_rope else None
        if isinstance(found, Miss):
            return found
        return role, layer.keys if found is None else replace(layer.keys, rope=found.rope)
    shape = new.meta["example_value"].shape
    if len(shape) != 4:
        return Miss(f"the cache tensor has {len(shape)} dimensions, expected 4", read)
    try:
        return role, context.planner.unknown_plan(module_path(read), int(shape[3]))
    except PlanError as error:
        # A plan that does not fit known keys or values is the user's; this one is a guess.
        return Miss(str(error).rstrip("."), read)
