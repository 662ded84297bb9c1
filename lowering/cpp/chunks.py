"""The ops of chunks in C++: each segment as a cache tensor of its own, see `kvpass.ops.chunks`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import FP, Codec
from kvpass.format.parse import parse_plan
from kvpass.format.retention import Residency
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.chunks import chunked, encoded, reordered
from lowering.cpp import append, pack
from lowering.cpp.attend import attend_segment, decline
from lowering.layouts import decline_gaps


def _plan(codec: Codec) -> str:
    """Of one segment alone, all of whose tokens are packed."""
    return str(FP if codec.identity else TensorPlan(codec, Residency(0, codec.token_group)))


def supports_reorder(new: Tensor, slots: Sequence[Tensor], plan: str) -> str | None:
    """Why C++ declines these arguments of ``kvpass::reorder_chunks``, or None."""
    codecs = [codec for codec in parse_plan(plan).codecs if not codec.identity]
    if not codecs:
        return f"{plan} stores all tokens as they are"
    return next(filter(None, (pack.supports(new, _plan(codec)) for codec in codecs)), None)


def reorder_chunks(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """As `kvpass.ops.chunks.reorder_chunks`, for arguments that `supports_reorder` takes."""
    return reordered(new, slots, plan, _encoded)


def _encoded(codec: Codec, tokens: Tensor) -> Sequence[Tensor]:
    return encoded(codec, tokens) if codec.identity else pack.pack(tokens, _plan(codec))[:2]


def _exact(state: Sequence[Tensor], plan: str) -> tuple[list[Tensor], int]:
    """The segment of exact tokens, and how many segments there are."""
    s, p = chunked(state, plan)
    return [s.codes, s.segment_ends], len(p.codecs)


def supports_append(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_chunks``, or None."""
    exact, segments = _exact(state, plan)
    return append.supports(exact, new, str(FP), rows, rope, segments=segments)


def append_chunks(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> None:
    """As `kvpass.ops.chunks.append_chunks`, for arguments that `supports_append` takes."""
    exact, segments = _exact(state, plan)
    append.append(exact, new, str(FP), rows, rope, segments=segments)


@cache
def _codecs(plan: str) -> tuple[Codec, ...]:
    return parse_plan(plan).codecs


def _segment(state: State, plan: ChunkedPlan, number: int) -> list[Tensor]:
    """The state of a segment as a cache tensor of its own, whose exact window is never read."""
    parts = [state[name] for name in plan.segment_fields(number)]
    window = [] if len(parts) == 1 else [state.codes]
    return [*parts, *window, state.segment_ends]


def _kind(codec: Codec) -> str:
    """See attention.cpp.jinja."""
    return "exact" if codec.identity else "packed"


def supports_attention(
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
    """Why C++ declines these arguments of ``kvpass::attention_chunks``, or None."""
    if window:
        return f"a window of {window} tokens that lie in the order of their bits"
    if reason := decline_gaps(keys, k_plan) or decline_gaps(values, v_plan):
        return reason
    pairs = list(zip(_codecs(k_plan), _codecs(v_plan), strict=True))
    kinds = [{_kind(k), _kind(v)} for k, v in pairs]
    if kinds != [*[{"packed"}] * (len(kinds) - 1), {"exact"}]:
        return f"a level of {k_plan} and {v_plan} is stored as it is"
    (k, kp), (v, vp) = chunked(keys, k_plan), chunked(values, v_plan)
    for number, codecs in enumerate(pairs):
        parts = _segment(k, kp, number), _segment(v, vp, number)
        k_alone, v_alone = map(_plan, codecs)
        if reason := decline(q, *parts, mask, k_alone, v_alone, _kind(codecs[0])):
            return reason
    return None


def attention_chunks(
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
    """As `kvpass.ops.chunks.attention_chunks`, for arguments that `supports_attention` takes.

    One segment after the other, each by code for its pair of codecs, in one softmax: each function
    carries on what those before it have summed.
    """
    (k, kp), (v, vp) = chunked(keys, k_plan), chunked(values, v_plan)
    segments = len(kp.codecs)
    carried = q.new_empty((*q.shape[:3], v.codes.shape[3] + 2), dtype=torch.float32)
    for number, codecs in enumerate(zip(kp.codecs, vp.codecs, strict=True)):
        k_alone, v_alone = map(_plan, codecs)
        out = attend_segment(
            q, _segment(k, kp, number), _segment(v, vp, number), mask, scale,
            k_alone, v_alone, sinks, causal, softcap, _kind(codecs[0]),
            k[kp.chunk_positions[number]], segments, number, carried,
        )  # fmt: skip
    return out
