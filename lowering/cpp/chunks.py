"""The ops of chunks in C++: each segment as a cache tensor of its own, see `kvpass.ops.chunks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import FP
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.ops.attention import AttentionArguments
from kvpass.ops.chunks import chosen, chunked, reordered, segment_plan
from lowering.cpp import append, pack
from lowering.cpp.attention import attend_segment, unsupported_arguments
from lowering.support import unsupported_gaps


def unsupported_reorder(new: Tensor, scatter_index: Sequence[Tensor], plan: str) -> str | None:
    """Why C++ declines these arguments of ``kvpass::reorder_chunks``, or None."""
    codecs = [codec for codec in parse_plan(plan).codecs if not codec.identity]
    if not codecs:
        return f"{plan} stores all tokens as they are"
    reasons = (pack.unsupported_reason(new, segment_plan(codec)) for codec in codecs)
    return next(filter(None, reasons), None)


def reorder_chunks(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """As `kvpass.ops.chunks.reorder_chunks`, for arguments that `unsupported_reorder` takes."""
    codecs = parse_plan(plan).codecs

    def encode_as(segment: int, new: Tensor, index: Tensor) -> Sequence[Tensor]:
        codec, tokens = codecs[segment], chosen(new, index)
        return [tokens] if codec.identity else pack.pack(tokens, segment_plan(codec))[:2]

    return reordered(new, scatter_index, plan, encode_as)


def _exact(state: Sequence[Tensor], plan: str) -> tuple[list[Tensor], int]:
    """The segment of exact tokens, and how many segments there are."""
    s, p = chunked(state, plan)
    return [s.codes, s.segment_ends], len(p.codecs)


def unsupported_append(
    state: Sequence[Tensor], new: Tensor, plan: str, *rotation: Any
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_chunks``, or None."""
    exact, segments = _exact(state, plan)
    return append.unsupported_reason(exact, new, str(FP), *rotation, segments=segments)


def append_chunks(
    state: list[Tensor], new: Tensor, plan: str, *rotation: Any, **named: Any
) -> None:
    """As `kvpass.ops.chunks.append_chunks`, for arguments that `unsupported_append` takes."""
    exact, segments = _exact(state, plan)
    append.append(exact, new, str(FP), *rotation, **named, segments=segments)


def _segment(state: State, plan: ChunkedPlan, number: int) -> list[Tensor]:
    """The state of a segment as a cache tensor of its own, whose exact window is never read."""
    parts = [state[name] for name in plan.segment_fields(number)]
    window = [] if len(parts) == 1 else [state.codes]
    return [*parts, *window, state.segment_ends]


def unsupported_attention(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention_chunks``, or None."""
    return unsupported_segments(AttentionArguments(*args, **kwargs))


def unsupported_segments(a: AttentionArguments, partial: bool = False) -> str | None:
    """Why C++ declines these arguments of `attend_segments`, or None."""
    if a.window:
        return f"a window of {a.window} tokens that lie in the order of their bits"
    if reason := unsupported_gaps(a.keys, a.k_plan) or unsupported_gaps(a.values, a.v_plan):
        return reason
    pairs = zip(parse_plan(a.k_plan).codecs, parse_plan(a.v_plan).codecs, strict=True)
    exact = [{k.identity, v.identity} for k, v in pairs]
    if exact != [*[{False}] * (len(exact) - 1), {True}]:
        return f"a segment of {a.k_plan} and {a.v_plan} is stored as it is"
    last = len(exact) - 1
    reasons = (
        unsupported_arguments(part, segment=True, partial=partial and number == last)
        for number, (part, _) in enumerate(_parts(a))
    )
    return next(filter(None, reasons), None)


def _parts(a: AttentionArguments) -> Iterator[tuple[AttentionArguments, Tensor]]:
    """For each segment alone: the arguments, and the positions of its tokens."""
    (k, k_plan), (v, v_plan) = chunked(a.keys, a.k_plan), chunked(a.values, a.v_plan)
    for number, codecs in enumerate(zip(k_plan.codecs, v_plan.codecs, strict=True)):
        keys, values = _segment(k, k_plan, number), _segment(v, v_plan, number)
        key_plan, value_plan = map(segment_plan, codecs)
        part = a._replace(keys=keys, values=values, k_plan=key_plan, v_plan=value_plan)
        yield part, k[k_plan.chunk_positions[number]]


def attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.chunks.attention_chunks`, for arguments that `unsupported_attention` takes."""
    return attend_segments(AttentionArguments(*args, **kwargs))


def attend_segments(a: AttentionArguments, partial: bool = False) -> Tensor:
    """One segment after the other, each by code for its pair of codecs, in one softmax: each
    function carries on what those before it have summed; see `kvpass.ops.attention_partial` for
    ``partial``."""
    parts = list(_parts(a))
    dim = a.states[1].codes.shape[3]
    carried = a.q.new_empty((*a.q.shape[:3], dim + 2), dtype=torch.float32)
    for number, (part, positions) in enumerate(parts):
        out = attend_segment(part, positions, len(parts), number, carried, partial)
    return out
