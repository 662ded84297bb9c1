"""``kvpass::attention`` in C++: a block of tokens at a time, straight from packed words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.codec import FP
from kvpass.cache.residency import Residency
from kvpass.cache.tensor_plan import TensorPlan
from lowering.cpp.attend import attend, attend_segment, decline
from lowering.layouts import decline_gaps


def supports(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention``, or None."""
    if TensorPlan.parse(k_plan).levels:
        return _decline_chunks(q, keys, values, mask, k_plan, v_plan, window)
    return decline(q, keys, values, mask, k_plan, v_plan)


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that `supports` takes.

    Args and result are that function's. A row that sees no token gives zero. Threads are torch's.
    """
    stored = (q, keys, values, mask, scale, k_plan, v_plan, sinks, causal)
    if TensorPlan.parse(k_plan).levels:
        return _attend_chunks(*stored, softcap)
    return attend(*stored, window, softcap)


@dataclass(frozen=True)
class _Segment:
    """One segment of chunks as a cache tensor of its own, whose exact window is never read.

    Attributes:
        plan: its plan.
        parts: the places of its state in that of the whole.
        places: the place of the positions of its tokens.
    """

    plan: str
    parts: tuple[int, ...]
    places: int

    @property
    def kind(self) -> str:
        """See attention.cpp.jinja."""
        return "exact" if len(self.parts) == 2 else "packed"

    def state(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Of the segment."""
        return [whole[i] for i in self.parts]


@cache
def _segments(plan: str) -> tuple[_Segment, ...]:
    """Those of the levels, and of exact tokens at the end."""
    p = TensorPlan.parse(plan)
    at, found = p.state_names.index, []
    for i, codec in enumerate(p.levels):
        if codec.identity:
            plan, names = str(FP), [f"codes{i}", "ends"]
        else:
            plan = str(TensorPlan(codec, Residency(0, codec.token_group)))
            names = [f"codes{i}", f"params{i}", "codes", "ends"]
        found.append(_Segment(plan, tuple(map(at, names)), at(f"places{i}")))
    return (*found, _Segment(str(FP), (at("codes"), at("ends")), at("places")))


def _decline_chunks(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    k_plan: str,
    v_plan: str,
    window: int,
) -> str | None:
    """As `supports`, where plans have levels."""
    if window:
        return f"a window of {window} tokens that lie in the order of their bits"
    if reason := decline_gaps(keys, k_plan) or decline_gaps(values, v_plan):
        return reason
    segments = list(zip(_segments(k_plan), _segments(v_plan), strict=True))
    kinds = [{k.kind, v.kind} for k, v in segments]
    if kinds != [*[{"packed"}] * (len(kinds) - 1), {"exact"}]:
        return f"a level of {k_plan} and {v_plan} is stored as it is"
    for k, v in segments:
        states = k.state(keys), v.state(values)
        if reason := decline(q, *states, mask, k.plan, v.plan, k.kind):
            return reason
    return None


def _attend_chunks(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None,
    causal: bool,
    softcap: float,
) -> Tensor:
    """One segment after the other, each by code for its pair of codecs, in one softmax: each
    function carries on what those before it have summed."""
    segments = list(zip(_segments(k_plan), _segments(v_plan), strict=True))
    carried = q.new_empty((*q.shape[:3], values[0].shape[3] + 2), dtype=torch.float32)
    for number, (k, v) in enumerate(segments):
        out = attend_segment(
            q, k.state(keys), v.state(values), mask, scale, k.plan, v.plan, sinks, causal, softcap,
            k.kind, keys[k.places], len(segments), number, carried,
        )  # fmt: skip
    return out
