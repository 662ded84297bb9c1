"""Cache tensors of which every process holds a part."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from kvpass._torch import all_gathered, is_traced
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.retention import MAX_STEP
from kvpass.format.shard import BLOCK
from kvpass.format.sharded_plan import ShardedChunks, ShardedPlan
from kvpass.format.state import State
from kvpass.ops.chunk_shard import joined
from kvpass.ops.shard import in_order, own_state
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.packed import PackedKV


class ShardedKV(PackedKV):
    """A `PackedKV` that stands for all tokens and stores a part of them, see
    `kvpass.format.sharded_plan`.

    What decodes it needs the parts of all processes: each of them has to do the same.

    Attributes:
        written: in the whole sequence, as its length.
    """

    plan: ShardedPlan

    @property
    def part(self) -> PackedKV:
        """The own tokens as a cache tensor of their own, on the same memory."""
        own = own_state(self.named, self.plan)
        tokens = self.plan.shard.own(self.written)
        return PackedKV(own.tensors, own.plan, tokens, self.dtype, basis=self.basis)

    @property
    def bits_per_element(self) -> float:
        """See `PackedKV.bits_per_element`; of the own tokens."""
        self.check()
        return self.part.bits_per_element

    def stored(self) -> Tensor:
        """See `PackedKV.stored`; waits for the other processes."""
        if is_traced(self.segment_ends):
            return super().stored()
        shard = self.plan.shard
        parts = all_gathered(super().stored(), shard.size, shard.group)
        return in_order(parts, self.shape[2], str(self.plan))

    @property
    def reserved(self) -> int:
        """See `PackedKV.reserved`."""
        found = super().reserved
        if found < 0:
            return found
        shard = self.plan.shard
        return shard.first + (found - shard.head) // BLOCK * BLOCK * shard.size

    def _reserve_capacity(self, needed: int) -> None:
        super()._reserve_capacity(self.plan.shard.own(needed + self.plan.sinks))

    def _reserve_window(self, new: int) -> None:
        """As `PackedStorage` does, for the own ones of the exact tokens."""
        plan, slots = self.plan, self.window.shape[2]
        if plan.retention.fraction:
            after = self.written + new - plan.sinks
            if plan.ring_slots(after) > slots:
                self.grow("window", plan.ring_slots(after + after // 4))
        elif plan.retention.pivotal and (new > MAX_STEP or slots > plan.ring):
            *_, packed, total = self.row_ends
            exact = total - packed + new
            wanted = max(plan.ring_slots(exact), plan.shard.most(exact))
            if wanted > slots or 2 * wanted <= slots or wanted == plan.ring:
                self.grow("window", wanted)

    def reserve_cos_sin(self, new: int, after: int) -> None:
        """See `PackedKV.reserve_cos_sin`."""
        plan, room = self.plan, self.cos_sin.shape[1]
        needed = plan.capacity(plan.shard.own(self.written + new))
        if needed > room:
            self.grow("cos_sin", max(needed, plan.capacity(room + room // 4)))

    def _ring_end(self, grows: str) -> int | None:
        end = super()._ring_end(grows)
        return None if end is None else self.plan.shard.own(end)

    def held_cos_sin(self) -> Tensor:
        """See `PackedKV.held_cos_sin`."""
        return self.cos_sin[:, : self.plan.shard.own(self.written)]

    def cropped(self, tokens: int, total: int) -> tuple[State, int, None]:
        """See `PackedKV.cropped`."""
        plan, part = self.plan, self.part
        left = plan.shard.own(total)
        state = State(part.cropped(left, left)[0].tensors, plan)
        ends = self.segment_ends.clone()
        if not plan.codec.identity:
            group, sinks = plan.codec.token_group, min(plan.sinks, total)
            ends.clamp_(max=sinks + (total - sinks) // group * group)
        ends[:, -1] = total
        state.segment_ends.copy_(ends)
        return state, total, None


class ShardedChunkedKV(ChunkedKV):
    """A `ChunkedKV` that stands for all tokens and stores a part of them, see
    `kvpass.format.sharded_plan.ShardedChunks`."""

    plan: ShardedChunks

    @property
    def part(self) -> ChunkedKV:
        """The own tokens as a cache tensor of their own, to be counted: on the same memory, with
        the positions of the whole sequence."""
        own = own_state(self.named, self.plan)
        tokens = sum(own.row_ends)
        return ChunkedKV(own.tensors, own.plan, tokens, self.dtype, self.written, self.basis)

    @property
    def counts(self) -> Tensor:
        """See `ChunkedKV.counts`; of the own tokens."""
        return self.segment_ends[:, :-1]

    def stored(self) -> Tensor:
        """See `PackedKV.stored`; waits for the other processes."""
        if is_traced(self.segment_ends):
            return super().stored()
        shard = self.plan.shard
        return joined(all_gathered(super().stored(), shard.size, shard.group), str(self.plan))

    def extended(self, new: int, after: int | None = None) -> Self:
        """See `PackedKV.extended`."""
        handle, own = super().extended(new, after), self.plan.shard.own
        tokens = self.shape[2]
        handle.written = self.written + own(tokens + new) - own(tokens)
        return handle

    def undo(self, before: dict[str, Tensor]) -> None:
        """See `PackedKV.undo`."""
        if before:
            super().undo(before)
            return
        ends, shard, tokens = self.segment_ends, self.plan.shard, self.shape[2]
        ends[:, -2] -= shard.own_of(ends[:, -1]) - shard.own(tokens)
        ends[:, -1] = tokens


def kind_of(plan: object) -> type[PackedKV]:
    """The class of a cache tensor that is stored by ``plan``."""
    if isinstance(plan, ChunkedPlan):
        return ShardedChunkedKV if isinstance(plan, ShardedChunks) else ChunkedKV
    return ShardedKV if isinstance(plan, ShardedPlan) else PackedKV


torch.serialization.add_safe_globals([ShardedKV, ShardedPlan, ShardedChunkedKV, ShardedChunks])
