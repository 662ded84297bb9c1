"""`ShardedPlan`: the tokens of a cache tensor are spread over processes, a part on each."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from kvpass.errors import PlanError
from kvpass.format.layout import StateLayout
from kvpass.format.shard import BLOCK, WHOLE, Shard
from kvpass.format.tensor_plan import TensorPlan

_PLAN = re.compile(r"(?P<whole>.+)/shard=(?P<shard>[^/]+)")


@dataclass(frozen=True)
class ShardedPlan(TensorPlan):
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
        if plan.uniform is not plan:
            raise PlanError(
                f"Chunks of different bits ({plan}) cannot be sharded: how many of them each "
                "process would hold is up to the request; allowed: plans of one codec."
            )
        group = plan.codec.token_group
        if plan.window_size is not None or plan.retained:
            raise PlanError(
                f"Tokens stored as {plan.summary()} cannot be sharded: allowed are plans without "
                "window_size, room and retained tokens."
            )
        if BLOCK % group or plan.sinks % group or plan.sinks > BLOCK:
            raise PlanError(
                f"Tokens stored as {plan.summary()} cannot be sharded: groups of {group} tokens "
                f"behind {plan.sinks} sinks do not fill blocks of {BLOCK}."
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

    def ring_slots(self, tokens: int) -> int:
        """See `TensorPlan.ring_slots`; of a ratio of the tokens, the own ones."""
        slots = super().ring_slots(tokens)
        return self.shard.most(slots) if self.grows else slots

    def sliding(self, window_size: int) -> TensorPlan:
        """See `TensorPlan.sliding`; every process holds all of the few tokens of a window."""
        return replace(self.own, retention=self.retention).sliding(window_size)
