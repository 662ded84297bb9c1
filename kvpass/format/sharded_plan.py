"""Plans of cache tensors whose tokens are spread over processes, a part on each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvpass.errors import PlanError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.layout import Field, StateLayout
from kvpass.format.shard import BLOCK, WHOLE, Shard
from kvpass.format.tensor_plan import TensorPlan

_PLAN = re.compile(r"(?P<whole>.+)/shard=(?P<shard>[^/]+)")


class Sharded:
    """What plans of a part have in common: ops on the own tokens take the state of a cache tensor
    of the `own` plan that has these only.

    Attributes:
        shard: the part.
    """

    shard: Shard

    @property
    def own(self) -> TensorPlan:
        """The plan of the own tokens alone."""
        raise NotImplementedError

    def own_ends(self, ends: Tensor) -> Tensor:
        """Where segments end among the own tokens, from ``segment_ends``; a copy."""
        raise NotImplementedError

    def columns(self, tokens: Tensor) -> Tensor:
        """The columns of a mask of the whole sequence that belong in these columns of one for
        attention to the own tokens."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShardedPlan(Sharded, TensorPlan):
    """The storage of a cache tensor of which this process holds a part.

    All else counts the tokens of the whole sequence, ``segment_ends`` too: which tokens are packed
    and which stay exact does not depend on the number of processes. What is held is the state of a
    cache tensor of the `own` plan that has the own tokens only, one behind the other.

    Attributes:
        shard: the part.
    """

    op_suffix: ClassVar[str] = "_shard"

    shard: Shard = WHOLE

    @classmethod
    def of(cls, plan: TensorPlan, shard: Shard) -> Self:
        """``plan`` of a part.

        Raises:
            PlanError: if its tokens cannot be spread.
        """
        group = plan.codec.token_group
        if plan.window_size is not None or plan.retained:
            raise PlanError(
                f"Tokens stored as {plan.summary()} cannot be sharded: allowed are plans without "
                "window_size, room and retained tokens."
            )
        first = shard.first
        if BLOCK % group or (first - plan.sinks) % group or max(first, plan.sinks) > BLOCK:
            behind = f" behind the first {first} tokens" if first else ""
            raise PlanError(
                f"Tokens stored as {plan.summary()} cannot be sharded: groups of {group} tokens "
                f"behind {plan.sinks} sinks do not fill blocks of {BLOCK}{behind}."
            )
        if first and plan.rope is not None:
            # All layers share the cosines and sines of their tokens.
            raise PlanError(
                f"Keys before RoPE stored as {plan.summary()} cannot be sharded behind {first} "
                f"sinks; allowed: a multiple of the {group} tokens of a group."
            )
        return cls(plan.codec, plan.retention, rope=plan.rope, shard=shard)

    def __str__(self) -> str:
        return f"{super().__str__()}/shard={self.shard}"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """See `TensorPlan.read`."""
        match = _PLAN.fullmatch(text)
        shard = None if match is None else Shard.parse(match["shard"])
        whole = None if match is None else TensorPlan.read(match["whole"])
        return None if whole is None or shard is None else cls.of(whole, shard)

    @cached_property
    def own(self) -> TensorPlan:
        """The plan of the own tokens alone: only the first process has sinks."""
        retention = self.retention if self.shard.rank == 0 else replace(self.retention, sinks=0)
        return TensorPlan(self.codec, retention, rope=self.rope)

    @cached_property
    def layout(self) -> StateLayout:
        """See `TensorPlan.layout`."""
        return self.own.layout

    def own_ends(self, ends: Tensor) -> Tensor:
        """See `Sharded.own_ends`."""
        return self.shard.own_of(ends)

    def columns(self, tokens: Tensor) -> Tensor:
        """See `Sharded.columns`: the own tokens come in the first ones."""
        return self.shard.positions(tokens)

    def ring_slots(self, tokens: int) -> int:
        """See `TensorPlan.ring_slots`; of a ratio of the tokens, the own ones."""
        slots = super().ring_slots(tokens)
        return self.shard.most(slots) if self.grows else slots

    def sliding(self, window_size: int) -> TensorPlan:
        """See `TensorPlan.sliding`; every process holds all of the few tokens of a window."""
        return replace(self.own, retention=self.retention).sliding(window_size)


@dataclass(frozen=True)
class ShardedChunks(Sharded, ChunkedPlan):
    """The storage of a cache tensor with chunks of different bits, of which this process holds a
    part: of each level whole chunks in turn (`kvpass.cocktail.placement`), and blocks of what
    decode steps add. ``segment_ends`` are those of the own tokens, and behind them the number of
    tokens of the whole sequence.
    """

    op_suffix: ClassVar[str] = "_chunks_shard"
    side_by_side: ClassVar[bool] = False

    shard: Shard = WHOLE

    @classmethod
    def of(cls, plan: ChunkedPlan, shard: Shard) -> Self:
        """``plan`` of a part."""
        return cls(chunk_codecs=plan.chunk_codecs, chunk=plan.chunk, shard=shard)

    def __str__(self) -> str:
        return f"{super().__str__()}/shard={self.shard}"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """See `TensorPlan.read`."""
        match = _PLAN.fullmatch(text)
        shard = None if match is None else Shard.parse(match["shard"])
        whole = None if match is None else ChunkedPlan.read(match["whole"])
        return None if whole is None or shard is None else cls.of(whole, shard)

    @cached_property
    def own(self) -> ChunkedPlan:
        """See `Sharded.own`."""
        return ChunkedPlan(chunk_codecs=self.chunk_codecs, chunk=self.chunk)

    @cached_property
    def layout(self) -> StateLayout:
        """See `TensorPlan.layout`."""
        shape = ("batch", len(self.segments) + 1)
        ends = Field("segment_ends", shape, torch.int32, overwritten="prefill")
        return StateLayout(*self._token_fields(), ends, *self._shared_fields())

    def length(self, ends: Sequence[int]) -> int:
        """See `TensorPlan.length`."""
        return ends[-1]

    def row_ends(self, counts: Sequence[int], tokens: int) -> list[int]:
        """See `ChunkedPlan.row_ends`; ``counts`` are of the own tokens."""
        return [*counts, tokens]

    def last_positions(self, ends: Tensor, slots: Tensor) -> Tensor:
        """See `ChunkedPlan.last_positions`."""
        numbers = self.shard.own_of(ends[:, -1:]) - ends[:, -2:-1] + slots
        return self.shard.positions(numbers)

    def own_ends(self, ends: Tensor) -> Tensor:
        """See `Sharded.own_ends`."""
        return ends[:, :-1].clone()

    def columns(self, tokens: Tensor) -> Tensor:
        """See `Sharded.columns`: tokens are known by their positions."""
        return tokens


def first_block(*plans: TensorPlan) -> int:
    """Where the blocks of a layer begin whose keys and values are stored by these plans: behind
    sinks that do not fill groups of tokens."""
    return max(plan.sinks if plan.sinks % plan.codec.token_group else 0 for plan in plans)


def part_of(plan: TensorPlan, shard: Shard) -> TensorPlan:
    """The plan of a part of a cache tensor that is stored by ``plan``.

    Raises:
        PlanError: if its tokens cannot be spread.
    """
    if isinstance(plan, ChunkedPlan):
        return ShardedChunks.of(plan, shard)
    return ShardedPlan.of(plan, shard)
