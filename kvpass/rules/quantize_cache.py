"""``cat([past, new])`` becomes ``kvpass.append(past, new)``."""

from __future__ import annotations

from torch.fx import Node

from kvpass.format.retention import MAX_STEP
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.reads import changes, last_reader
from kvpass.graph.analysis.updates import CacheUpdate
from kvpass.graph.logical_calls import AppendCall, PackedCall
from kvpass.graph.orders import constant_node
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule
from kvpass.rules.plan_for import changed_later, plan_for, pre_rope


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
        if update.past is not None:
            kept = update.past.meta["example_value"].plan.window_size
            if kept != update.window_size:
                return Miss(
                    f"the cache keeps {kept} tokens, its update {update.window_size}",
                    update.returned,
                )
            rope = update.past.meta["example_value"].plan.rope
            found = pre_rope(update.new, node, context) if rope is not None else None
            if isinstance(found, Miss):
                return found
            if rope != (None if found is None else found.rope):
                return Miss(f"the cache holds keys before {rope}, which they do not get", node)
            # A filled cache goes on as it was begun; an empty one follows the recipe.
            role, _ = context.sites.roles.get(node, ("unknown", None))
            return {"update": update, "role": role, "plan": update.past.meta["example_value"].plan}
        stored = plan_for(update.new, node, context)
        if isinstance(stored, Miss):
            return stored
        role, plan = stored
        plan = plan if update.window_size is None else plan.sliding(update.window_size)
        return {"update": update, "role": role, "plan": plan}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        update, plan = found["update"], found["plan"]
        n = update.new.meta["example_value"].shape[2]
        if update.packed and n <= MAX_STEP:
            with context.graph.inserting_before(node):
                packed = _append(update, plan, context)
            node.replace_all_uses_with(packed)
            context.graph.erase_node(node)
            if update.returned is not node:
                with context.graph.inserting_before(update.returned):
                    _return(_slide(packed, update, context), update, context)
        else:
            with context.graph.inserting_after(last_reader(node)):
                packed = _append(update, plan, context)
            with context.graph.inserting_after(packed):
                _return(_slide(packed, update, context), update, context)
            if update.packed:
                with context.graph.inserting_before(node):
                    past = PackedCall(update.past).insert(context.graph)
                past.meta["example_value"] = update.past.meta["example_value"].decode()
                node.replace_input_with(update.past, past)
            elif update.new is not node:
                node.replace_all_uses_with(update.new)
                context.graph.erase_node(node)
        context.replaced(node, packed)
        return f"{found['role']} {plan.summary()}"


def _slide(packed: Node, update: CacheUpdate, context: Context) -> Node:
    """What the cache keeps of ``packed``."""
    if update.returned is update.cat or update.past is None:
        return packed
    slid = PackedCall(packed).insert(context.graph, logical.slide)
    slid.meta = {**update.returned.meta}
    return slid


def _return(packed: Node, update: CacheUpdate, context: Context) -> None:
    context.graph.output_node().replace_input_with(update.returned, packed)
    if not update.returned.users:
        context.graph.erase_node(update.returned)


def _append(update: CacheUpdate, plan: TensorPlan, context: Context) -> Node:
    whole = plan.window_size is not None and update.returned is update.cat
    constant = None
    if update.past is None and (ranges := context.ranges.get(update.cat)) is not None:
        example, params = update.new.meta["example_value"], ranges.tensor()
        constant = constant_node(context.graph, params, example.device)
        constant.meta["example_value"] = example.new_empty(params.shape, dtype=params.dtype)
    call = AppendCall(update.past, update.new, str(plan), whole, ranges=constant)
    packed = call.insert(context.graph)
    packed.meta = {**update.cat.meta}
    return packed
