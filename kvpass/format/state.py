"""`State`: the tensors of a packed cache tensor by their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass.format.layout import StateLayout
from kvpass.format.parse import parse_plan
from kvpass.format.tensor_plan import TensorPlan


class StateTensors:
    """The tensors of a state as attributes; those that the plan's layout lacks are not there.

    Attributes:
        plan: how tokens are stored.
        codes: words of packed tokens, int16 ``[B, H, C, W]``; exact tokens where the codec is the
            identity.
        qparams: scales and minima, see `kvpass.format.codec`.
        window: exact tokens ``[B, H, ring, D]``, token ``t`` at slot ``t % ring``.
        sinks: the first tokens ``[B, H, S, D]``.
        outliers, token_scales: int32 ``[B, C, N]`` and half ``[B, C, 1]`` of packed tokens.
        retained, positions: tokens ``[B, H, N, D]`` that a filter keeps exact, and their positions,
            int32 ``[B, H, N]`` (-1: none).
        segment_ends: int32 ``[B, segments]``, the position at which each segment ends.
        cos_sin: see `kvpass.ops.cos_sin`; all layers hold the same.
    """

    plan: TensorPlan
    codes: Tensor
    qparams: Tensor
    window: Tensor
    sinks: Tensor
    outliers: Tensor
    token_scales: Tensor
    retained: Tensor
    positions: Tensor
    segment_ends: Tensor
    cos_sin: Tensor

    @property
    def row_ends(self) -> list[int]:
        """The ends of the segments, which are the same in every sequence of a batch."""
        ends: list[list[int]] = self.segment_ends.tolist()
        return ends[0] if ends else [0] * self.segment_ends.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that the packed segment has room for."""
        return self.codes.shape[2]


class State(StateTensors):
    """A view of the tensors that cross the boundary of an op: all of the layout, or all but those
    that layers share."""

    def __init__(self, tensors: Sequence[Tensor], plan: TensorPlan) -> None:
        self.plan = plan
        # In the order in which ops take them.
        self.tensors = list(tensors)
        self.__dict__.update(zip(plan.layout.names, tensors, strict=False))

    @staticmethod
    def of(tensors: Sequence[Tensor], plan: str) -> State:
        """The state with a printed plan, as ops get it."""
        return State(tensors, parse_plan(plan))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.__dict__[name]
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    @property
    def layout(self) -> StateLayout:
        """The fields that these tensors are."""
        return self.plan.layout

    @property
    def tokens(self) -> Tensor:
        """Some exact tokens ``[B, H, ..., D]``, which have the shape and dtype of all."""
        return self[self.layout.tokens]

    def length(self, row: int = 0) -> int:
        """The number of tokens of a sequence of the batch."""
        return self.plan.length(self.segment_ends[row].tolist())


def empty_state(new: Tensor, plan: TensorPlan, tokens: int, **sizes: int) -> State:
    """Unwritten state with room for ``tokens`` packed tokens shaped like ``new`` ``[B, H, T, D]``,
    without what all layers share; ``sizes`` are given instead of those of the plan."""
    sizes = plan.sizes(new.shape, tokens) | sizes
    return State([f.empty(new, sizes) for f in plan.layout.own], plan)
