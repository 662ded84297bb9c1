"""How a cache tensor that is still empty is to be stored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from kvpass.errors import PlanError
from kvpass.format.channels import ChannelBasis, ChannelRanges
from kvpass.format.ranks import Ranks
from kvpass.format.sharded_plan import first_block
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.sites import module_path
from kvpass.graph.pattern import Miss
from kvpass.plan import LayerPlan
from kvpass.rules.base import Context
from kvpass.rules.cache_before_rope import RopeMatch, rope_match


@dataclass(frozen=True)
class StoragePlan:
    """How a cache tensor is to be stored.

    Attributes:
        role: what attention reads it as.
        plan: its own.
        basis: of the channels of one that is still empty; None for the model's own.
        ranges: calibrated ones of one that is still empty.
        first: where blocks begin that are dealt to several processes, see `first_block`.
    """

    role: str
    plan: TensorPlan
    basis: ChannelBasis | None = None
    ranges: ChannelRanges | None = None
    first: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.plan.summary()}".strip()


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


def plan_for(new: Node, read: Node, context: Context) -> StoragePlan | Miss:
    """What the recipe says of a cache tensor that is still empty.

    Args:
        new: what is to be appended.
        read: what attention reads: a cat, or a static cache's buffer.

    Raises:
        PlanError: if the recipe does not fit known keys or values.
    """
    role, site = context.sites.roles.get(read, ("unknown", None))
    if site is None or role == "unknown":
        shape = new.meta["example_value"].shape
        if len(shape) != 4:
            return Miss(f"the cache tensor has {len(shape)} dimensions, expected 4", read)
        try:
            plan = context.planner.unknown_plan(module_path(read), int(shape[3]))
        except PlanError as error:
            # A plan that does not fit known keys or values is the user's; this one is a guess.
            return Miss(str(error).rstrip("."), read)
        return StoragePlan(role, plan)
    k, v = (node.meta["example_value"].shape for node in (site.keys, site.values))
    key_dim, value_dim, kv_heads = int(k[3]), int(v[3]), int(k[1])
    if warning := context.planner.warning(site.heads, kv_heads):
        context.warnings.append(f"{site.path}: {warning}")
    layer = context.planner.layer_plan(site.path, key_dim, value_dim)
    if context.ranks is None:
        layer.check(site.path, key_dim, value_dim, kv_heads)
    else:
        layer = _of_rank(layer, site.path, context.ranks, (key_dim, value_dim, kv_heads))
    first = first_block(layer.keys, layer.values)
    if role == "values":
        return StoragePlan(role, layer.values, layer.value_basis, first=first)
    if context.sites.static(read) and (layer.before_rope or layer.keys.codec.static_ranges):
        return Miss("a static cache takes no calibrated keys, and none before RoPE", read)
    found = pre_rope(new, read, context) if layer.before_rope else None
    if isinstance(found, Miss):
        return found
    plan = layer.keys if found is None else replace(layer.keys, rope=found.rope)
    return StoragePlan(role, plan, layer.key_basis, layer.key_ranges, first)


def _of_rank(layer: LayerPlan, path: str, ranks: Ranks, shape: tuple[int, int, int]) -> LayerPlan:
    """The plan of this process's heads; ``shape``: channels of keys and of values, and KV heads."""
    own = layer.of_rank(ranks, *shape)
    try:
        own.check(path, *shape)
    except PlanError as error:
        raise PlanError(
            f"{error} Each of {len(ranks.every)} ranks stores its own {shape[2]} KV heads: a plan "
            "must be calibrated on all of them, and no group may span those of several ranks."
        ) from None
    return own
