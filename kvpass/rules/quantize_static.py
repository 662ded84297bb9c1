"""``buffer.index_copy_(2, arange(n) + count, new)`` becomes ``kvpass.append(buffer, new)``."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from kvpass.errors import PlanError
from kvpass.format.retention import MAX_STEP
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.effects import changes
from kvpass.graph.analysis.reads import last_reader
from kvpass.graph.analysis.static import StaticUpdate
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.packed_readers import unpacked
from kvpass.graph.pattern import Captures, Miss
from kvpass.rules.base import Context, Rule
from kvpass.rules.plan_for import StoragePlan, changed_later, plan_for


# Where count is how many tokens are written, which is checked when the graph is called. Lossy as
# quantize_cache, and exact in a prefill as well: its attention reads the new tokens or a plain
# buffer, which lives as long as its layer. A window of a fixed length is the same with its last
# tokens and the new ones copied into it. A plain buffer that was filled elsewhere is packed after a
# first call that reads and writes it plain.
class QuantizeStatic(Rule):
    """Keeps a static cache packed."""

    name = "quantize_static"
    identity = "buffer.index_copy_(2, arange(n) + count, new)  ~  append(buffer, new)"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every write into a static cache that is understood, whatever reads it."""
        update = context.sites.statics.get(node)
        if not isinstance(update, StaticUpdate):
            return update
        if any(change is not node for change in changes(update.buffer)):
            return Miss("the static buffer is changed in place elsewhere, too", update.buffer)
        if miss := changed_later(update.new, node, context):
            return miss
        if update.past is not None:
            plan = update.past.meta["example_value"].plan
            return {"update": update, "stored": StoragePlan("", plan)}
        if _unread(update):
            reason = "nothing reads it in this graph: its attention is behind a graph break"
            return Miss(reason, update.buffer)
        if context.shard is not None:
            raise PlanError("A static cache cannot be sharded; allowed: a DynamicCache.")
        stored = plan_for(update.new, update.buffer, context)
        if isinstance(stored, Miss):
            return stored
        try:
            stored = replace(stored, plan=stored.plan.static(update.room))
        except PlanError as error:
            return Miss(str(error).rstrip("."), update.buffer)
        return {"update": update, "stored": stored}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        update, stored, graph = found["update"], found["stored"], context.graph
        plan = stored.plan
        if update.plain:
            # The graph runs as it is, and the buffer is packed when it has run.
            update.write.meta["pack_after"] = (update, plan, stored.basis)
            return f"{stored}, packed after this call"
        n = update.new.meta["example_value"].shape[2]
        if update.past is None:
            packed = _first_prompt(update, plan, context)
        elif n <= MAX_STEP:
            with graph.inserting_before(node):
                packed = _append(update, plan, context)
            # What was read before is the past: it feeds the write, and what is dead with it.
            update.buffer.replace_all_uses_with(packed, lambda user: user > node)
            for joined in update.reads:
                joined.replace_all_uses_with(packed, lambda user: user not in update.dead)
            graph.erase_node(node)
            _erase_dead(update, graph)
        else:
            with graph.inserting_before(min(update.buffer.users)):
                plain = unpacked(update.buffer)
            update.buffer.replace_all_uses_with(plain, lambda user: user is not plain)
            with graph.inserting_after(last_reader(plain)):
                packed = _append(update, plan, context)
        context.replaced(update.buffer, packed, stored.basis)
        return str(stored)


def _unread(update: StaticUpdate) -> bool:
    """Whether nothing in the graph reads what it writes: an attention elsewhere would find the
    prompt rounded."""
    written = {update.write, *update.dead}
    readers = {*update.buffer.users, *update.new.users} - written
    return all(reader.op == "output" for reader in readers)


def _first_prompt(update: StaticUpdate, plan: TensorPlan, context: Context) -> Node:
    """The buffer goes where only its new tokens are read, else it lives as long as its layer."""
    graph, buffer = context.graph, update.buffer
    with graph.inserting_after(max(last_reader(buffer), update.write)):
        packed = _append(update, plan, context)
    graph.output_node().replace_input_with(buffer, packed)
    for part in update.slices:
        part.replace_all_uses_with(update.new)
        graph.erase_node(part)
    if list(buffer.users) == [update.write]:
        graph.erase_node(update.write)
        graph.erase_node(buffer)
        _erase_dead(update, graph)
    return packed


def _erase_dead(update: StaticUpdate, graph: Graph) -> None:
    for node in update.dead:
        if not node.users:
            graph.erase_node(node)


def _append(update: StaticUpdate, plan: TensorPlan, context: Context) -> Node:
    packed = AppendCall(update.past, update.new, str(plan)).insert(context.graph)
    # Where a window is joined with new tokens, attention sees more than the buffer holds.
    shown = update.reads[0] if update.past and update.reads else update.buffer
    packed.meta = {**shown.meta, "static": update}
    return packed
