"""``cat([past, new])`` becomes ``kvpass.append(past, new)``."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from kvpass.format.retention import MAX_STEP
from kvpass.format.sharded_plan import part_of
from kvpass.graph.analysis.effects import changes
from kvpass.graph.analysis.reads import last_reader
from kvpass.graph.analysis.updates import CacheUpdate
from kvpass.graph.bases import constant_beside
from kvpass.graph.logical_calls import AppendCall, PackedCall
from kvpass.graph.packed_readers import unpacked
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule
from kvpass.rules.plan_for import StoragePlan, changed_later, plan_for, pre_rope


# The one lossy rule: tokens that have left the exact window come back rounded by their codec. A
# step of up to MAX_STEP tokens reads what was appended. A longer one (a prefill) attends exactly:
# what reads it keeps reading the plain cat, and the append moves behind the last of that, so that
# only one layer's plain keys and values live. Where the cache keeps the last tokens of the cat, so
# does the packed one.
class QuantizeCache(Rule):
    """Keeps the cache packed."""

    name = "quantize_cache"
    identity = "cat([past, new], -2)  ~  append(past, new)"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every cache update that is understood, whatever reads it."""
        update = context.sites.updates.get(node)
        if update is None:
            return context.sites.unrecognized.get(node)
        if changes(node):
            return Miss("the updated cache tensor is changed in place", node)
        if miss := changed_later(update.new, node, context):
            return miss
        if update.past is None:
            stored = plan_for(update.new, node, context)
            if isinstance(stored, Miss):
                return stored
            if update.window_size is not None:
                stored = replace(stored, plan=stored.plan.sliding(update.window_size))
            elif context.shard is not None:
                shard = replace(context.shard, first=stored.first)
                stored = replace(stored, plan=part_of(stored.plan, shard))
            return {"update": update, "stored": stored}
        # A filled cache goes on as it was begun; an empty one follows the recipe.
        plan = update.past.meta["example_value"].plan
        if plan.window_size != update.window_size:
            reason = f"the cache keeps {plan.window_size} tokens, its update {update.window_size}"
            return Miss(reason, update.returned)
        found = pre_rope(update.new, node, context) if plan.rope is not None else None
        if isinstance(found, Miss):
            return found
        if plan.rope != (None if found is None else found.rope):
            return Miss(f"the cache holds keys before {plan.rope}, which they do not get", node)
        role, _ = context.sites.roles.get(node, ("unknown", None))
        return {"update": update, "stored": StoragePlan(role, plan)}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        update, stored, graph = found["update"], found["stored"], context.graph
        if update.past is not None and update.new.meta["example_value"].shape[2] <= MAX_STEP:
            with graph.inserting_before(node):
                packed = _append(update, stored, graph)
            node.replace_all_uses_with(packed)
            graph.erase_node(node)
            if update.returned is not node:
                with graph.inserting_before(update.returned):
                    _return(packed, update, graph)
        else:
            with graph.inserting_after(last_reader(node)):
                packed = _append(update, stored, graph)
            with graph.inserting_after(packed):
                _return(packed, update, graph)
            if update.past is not None:
                with graph.inserting_before(node):
                    past = unpacked(update.past)
                node.replace_input_with(update.past, past)
            elif update.new is not node:
                node.replace_all_uses_with(update.new)
                graph.erase_node(node)
        context.replaced(node, packed, stored.basis)
        return str(stored)


def _return(packed: Node, update: CacheUpdate, graph: Graph) -> None:
    """Lets the graph return what the cache keeps of ``packed``."""
    if update.returned is not update.cat and update.past is not None:
        packed = PackedCall(packed).insert(graph, logical.slide)
        packed.meta = {**update.returned.meta}
    graph.output_node().replace_input_with(update.returned, packed)
    if not update.returned.users:
        graph.erase_node(update.returned)


def _append(update: CacheUpdate, stored: StoragePlan, graph: Graph) -> Node:
    whole = stored.plan.window_size is not None and update.returned is update.cat
    constant = None
    if stored.ranges is not None:
        constant = constant_beside(graph, stored.ranges.tensor(), update.new)
    call = AppendCall(update.past, update.new, str(stored.plan), whole, ranges=constant)
    packed = call.insert(graph)
    packed.meta = {**update.cat.meta}
    return packed
