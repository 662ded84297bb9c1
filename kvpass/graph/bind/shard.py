"""Binds readers of cache tensors of which every process holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass._torch import all_gathered
from kvpass._torch_sizes import symbol_node
from kvpass.format.shard import Shard
from kvpass.format.sharded_plan import Sharded, ShardedChunks
from kvpass.graph.calls import add_call
from kvpass.graph.logical_calls import AttentionCall
from kvpass.ops.chunk_shard import joined
from kvpass.ops.library import op_of
from kvpass.ops.shard import in_order, merge, prompt_sums, with_sums

ops = torch.ops.kvpass
# See `kvpass.ops.shard.same_sums`: bfloat16 rounds a query, in a sum over a prompt that is lost.
_SAME_QUERIES, _SAME_PROMPTS = 1e-2, 1e-4


class ShardBinder:
    """Attention to the own tokens, and one collective that brings those of all together."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        # Whether all processes are asked for the same tokens, once in a graph.
        self._checked = False
        # Of all layers: by the mask, the bounds and where blocks begin.
        self._masks: dict[tuple[Node | None, bool, int, Shard], Node] = {}

    def attention(
        self, call: AttentionCall, plans: Sequence[Any], states: Sequence[list[Node]]
    ) -> Node:
        """The attention ``call`` over keys and values with these plans and states."""
        shard, mask = plans[0].shard, self._mask(call, plans[0], states[0])
        sinks = call.sinks if shard.rank == 0 else None
        if isinstance(plans[0], ShardedChunks):
            attention = op_of(plans[0], "attention_partial")
        else:
            attention = ops.attention_partial.default
            states = [self._own(*side) for side in zip(plans, states, strict=True)]
            plans = [plan.own for plan in plans]
        variant = (*map(str, plans), sinks, False, 0, call.softcap)
        partial = add_call(self._graph, attention, call.q, *states, mask, call.scale, *variant)
        if not self._checked:
            partial = add_call(self._graph, with_sums, partial, call.q)
        gathered = self._gathered(partial, shard)
        if not self._checked:
            gathered = self._same(gathered, gathered, shard, _SAME_QUERIES)
            self._checked = True
        dtype = call.q.meta["example_value"].dtype
        channels = int(call.values.meta["example_value"].shape[3])
        return add_call(self._graph, merge, gathered, shard.size, channels, dtype)

    def _own(self, plan: Any, state: list[Node]) -> list[Node]:
        """The state of the own tokens as that of a cache tensor of their own."""
        at = plan.layout.names.index("segment_ends")
        ends = add_call(self._graph, ops.own_ends.default, state[at], str(plan))
        return [*state[:at], ends, *state[at + 1 :]]

    def _mask(self, call: AttentionCall, plan: Any, keys: list[Node]) -> Node | None:
        """What of the own tokens is seen; None: all."""
        queries = call.q.meta["example_value"].shape[2]
        # A single query comes last.
        causal = call.causal and not (isinstance(queries, int) and queries == 1)
        if call.mask is None and not causal and not call.window:
            return None
        key = (call.mask, causal, call.window, plan.shard)
        if key not in self._masks:
            ends = keys[plan.layout.names.index("segment_ends")]
            tokens = call.keys.meta["example_value"].shape[2]
            sizes = (symbol_node(self._graph, size) for size in (queries, tokens))
            bounds = (causal, call.window)
            arguments = (call.mask, ends, str(plan), *sizes, *bounds)
            self._masks[key] = add_call(self._graph, ops.own_mask.default, *arguments)
        return self._masks[key]

    def unpacked(self, part: Node, tokens: Node | int, plan: Sharded) -> Node:
        """All ``tokens``, of which ``part`` is the own part, see `kvpass.ops.shard`."""
        gathered = self._gathered(part, plan.shard)
        if isinstance(plan, ShardedChunks):
            return add_call(self._graph, joined, gathered, str(plan))
        return add_call(self._graph, in_order, gathered, tokens, str(plan))

    def prompt(self, new: Node, shard: Shard) -> Node:
        """The tokens ``new`` of a prompt; the first time those of all processes are compared."""
        if self._checked:
            return new
        self._checked = True
        sums = self._gathered(add_call(self._graph, prompt_sums, new), shard)
        return self._same(new, sums, shard, _SAME_PROMPTS)

    def _same(self, x: Node, sums: Node, shard: Shard, tolerance: float) -> Node:
        return add_call(self._graph, ops.same_sums.default, x, sums, shard.size, tolerance)

    def _gathered(self, part: Node, shard: Shard) -> Node:
        return add_call(self._graph, all_gathered, part, shard.size, shard.group)
