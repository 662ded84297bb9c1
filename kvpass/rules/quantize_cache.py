"""``cat([past, new])`` becomes ``kvpass.append(past, new)``."""

from __future__ import annotations

from torch.fx import Node

from kvpass.cache.residency import MAX_STEP, TensorPlan
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.sites import AttentionSite, CacheUpdate, nearest_miss
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule


# cat([past, new], -2)  ~  append(past, new)
#
# The one lossy rule: tokens that have left the exact window come back rounded by their codec. A
# step of up to MAX_STEP tokens reads what was appended. A longer one (a prefill) attends exactly:
# its own attention keeps reading the plain cat, and the append moves behind it, so that only one
# layer's plain keys and values live.
class QuantizeCache(Rule):
    """Keeps the cache packed."""

    name = "quantize_cache"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every cache update whose attention is understood."""
        update = context.sites.updates.get(node)
        if update is None:
            return context.sites.strange.get(node)
        if node not in context.sites.roles:
            return nearest_miss(node, context.sites)
        role, site = context.sites.roles[node]
        return {"update": update, "role": role, "site": site}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        update, site = found["update"], found["site"]
        plan = _plan(update, found["role"], site, context)
        n = update.new.meta["example_value"].shape[2]
        if update.packed and n <= MAX_STEP:
            with context.graph.inserting_before(node):
                packed = _append(update, plan, context)
            node.replace_all_uses_with(packed)
            context.graph.erase_node(node)
        else:
            with context.graph.inserting_after(site.root):
                packed = _append(update, plan, context)
            context.graph.output_node().replace_input_with(node, packed)
            if update.packed:
                with context.graph.inserting_before(node):
                    past = context.graph.call_function(logical.unpack, (update.past,))
                past.meta["example_value"] = update.past.meta["example_value"].decode()
                node.replace_input_with(update.past, past)
            elif update.new is not node:
                node.replace_all_uses_with(update.new)
                context.graph.erase_node(node)
        context.packed[node] = packed
        return f"{found['role']} {plan}"


def _append(update: CacheUpdate, plan: TensorPlan, context: Context) -> Node:
    packed = context.graph.call_function(logical.append, (update.past, update.new, str(plan)))
    packed.meta = {**update.cat.meta}
    return packed


def _plan(update: CacheUpdate, role: str, site: AttentionSite, context: Context) -> TensorPlan:
    """A filled cache goes on as it was begun; an empty one follows the recipe."""
    if update.past is not None:
        past: TensorPlan = update.past.meta["example_value"].plan
        return past
    q, k, v = (node.meta["example_value"] for node in (site.q, site.keys, site.values))
    heads = (int(q.shape[1]), int(k.shape[1]))
    layer = context.layer_plan(site.path, int(k.shape[3]), int(v.shape[3]), heads)
    return layer.keys if role == "keys" else layer.values
