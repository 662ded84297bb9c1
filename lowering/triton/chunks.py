"""The ops of chunks in Triton: kernels for each segment alone, and one softmax over all of them.

Where tokens go, how many a segment has and where they stand in the text is read from the device:
what a request asks for compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import FP
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.ops.append_attention import StepArguments, own_tensors
from kvpass.ops.attention import AttentionArguments, with_signature
from kvpass.ops.chunks import chosen_counts, chunked, reordered, segment_plan
from lowering.codegen import load_kernels
from lowering.support import dense, unsupported_conversion, unsupported_formats, unsupported_gaps
from lowering.triton import append
from lowering.triton.append_attention import append_both
from lowering.triton.attention import (
    Advance,
    empty_sums,
    launch_splits,
    merged,
    most_rows,
    query_rows,
    unsupported_query,
)
from lowering.triton.heuristics import (
    COPIED_TOKENS,
    attention_sizes,
    decode_tokens,
    encode_tokens,
)
from lowering.triton.launch import launch, on_nvidia
from lowering.triton.layouts import (
    clipping,
    layout_of,
    rooms,
    unsupported_device,
    unsupported_dtype,
    unsupported_encoding,
    unsupported_heads,
)
from triton_templates import CAPACITY_TILE, Layout


def _layout(plan: ChunkedPlan, segment: int, dim: int) -> Layout:
    """The layout of one segment, with the tensors of `_tensors`."""
    codec = plan.codecs[segment]
    state = (*(("codes",) if codec.identity else ("codes", "qparams")), "segment_ends")
    layout = layout_of(segment_plan(codec), dim)
    return replace(layout, ring=0, state=state, segment=(segment, len(plan.codecs)))


def _tensors(state: State, plan: ChunkedPlan, segment: int) -> list[Tensor]:
    """The tensors of one segment, in the order of its layout."""
    return [*(state[name] for name in plan.segment_fields(segment)), state.segment_ends]


def _unsupported_segments(plan: ChunkedPlan, dim: int) -> str | None:
    """Why the kernels cannot write and read these segments, or None."""
    for segment, codec in enumerate(plan.codecs):
        layout = _layout(plan, segment, dim)
        reason = unsupported_encoding(segment_plan(codec), dim) or layout.unsupported_reason()
        if reason is None and layout.dequant_first:
            reason = f"groups of {codec} that span heads are not supported"
        if reason is not None:
            return f"chunks of {codec}: {reason}"
    if plan.tile % CAPACITY_TILE:
        return f"room for {plan.tile} tokens is no multiple of {CAPACITY_TILE}"
    return None


def _unsupported_prompt(new: Tensor, plan: str) -> str | None:
    _, p = chunked((), plan)
    return (
        unsupported_device(new)
        or unsupported_dtype(new, "the cache")
        or unsupported_heads(new)
        or _unsupported_segments(p, int(new.shape[3]))
    )


def unsupported_reorder(new: Tensor, scatter_index: Sequence[Tensor], plan: str) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::reorder_chunks``, or None."""
    return _unsupported_prompt(new, plan)


def reorder_chunks(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """As `kvpass.ops.chunks.reorder_chunks`, for arguments that are supported."""
    _, p = chunked((), plan)
    new = dense(new)
    sizes = p.chunk_sizes(new.shape, [index.shape[1] * index.shape[2] for index in scatter_index])
    ends = new.new_zeros((new.shape[0], len(p.codecs)), dtype=torch.int32)

    def encode_as(segment: int, new: Tensor, index: Tensor) -> list[Tensor]:
        parts = [p.layout[name].empty(new, sizes) for name in p.segment_fields(segment)]
        _extend_segment([*parts, ends], p, segment, new, index)
        return parts

    return reordered(new, scatter_index, plan, encode_as)


def unsupported_extend(
    state: Sequence[Tensor], new: Tensor, scatter_index: Sequence[Tensor], plan: str
) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::extend_chunks``, or None."""
    return _unsupported_prompt(new, plan) or unsupported_gaps(state, plan)


def extend_chunks(state: list[Tensor], new: Tensor, scatter_index: list[Tensor], plan: str) -> None:
    """As `kvpass.ops.chunks.extend_chunks`, for arguments that are supported."""
    s, p = chunked(state, plan)
    new = dense(new)
    for segment, index in enumerate(scatter_index):
        _extend_segment(_tensors(s, p, segment), p, segment, new, index)
    s.segment_ends.add_(chosen_counts(scatter_index))


def _extend_segment(
    tensors: Sequence[Tensor], plan: ChunkedPlan, segment: int, new: Tensor, scatter_index: Tensor
) -> None:
    batch, heads, _, dim = new.shape
    layout, codec = _layout(plan, segment, dim), plan.codecs[segment]
    tokens = COPIED_TOKENS if layout.identity else encode_tokens(layout)
    count = scatter_index.shape[1] * scatter_index.shape[2]
    factor, _ = clipping(parse_plan(segment_plan(codec)), None)
    launch(
        load_kernels("extend_chunks", layout=layout).extend_segment,
        (-(-count // tokens), batch * heads),
        *tensors, new, scatter_index, *rooms(tensors, layout), *new.stride()[:3], count,
        factor,
        KV_HEADS=heads, TOKENS=tokens, CLIPPED=codec.clip != 1,
    )  # fmt: skip


def unsupported_append(
    state: Sequence[Tensor], new: Tensor, plan: str, *rotation: Any
) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append_chunks``, or None."""
    s, p = chunked(state, plan)
    exact = _tensors(s, p, len(p.codecs) - 1)
    return unsupported_gaps(state, plan) or append.unsupported_reason(
        exact, new, str(FP), *rotation
    )


# triton_op reads the schema from the signature.
def append_chunks(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
) -> None:
    """As `kvpass.ops.chunks.append_chunks`, for arguments that are supported."""
    s, p = chunked(state, plan)
    last = len(p.codecs) - 1
    layout, exact = _layout(p, last, int(new.shape[3])), parse_plan(segment_plan(p.codecs[last]))
    append.append_as(_tensors(s, p, last), new, exact, layout, cos_sin, rope)


class _Segment(NamedTuple):
    """What attention does in one segment.

    Attributes:
        arguments: with the tensors of the segment alone.
        layouts: of its keys and of its values.
        positions: of its tokens, int32 ``[B, N]``.
    """

    arguments: AttentionArguments
    layouts: tuple[Layout, Layout]
    positions: Tensor


def _segments(a: AttentionArguments) -> Iterator[_Segment]:
    (k, k_plan), (v, v_plan) = chunked(a.keys, a.k_plan), chunked(a.values, a.v_plan)
    key_dim, value_dim = int(a.q.shape[3]), int(v.codes.shape[3])
    for number, name in enumerate(k_plan.chunk_positions):
        layouts = _layout(k_plan, number, key_dim), _layout(v_plan, number, value_dim)
        alone = a._replace(keys=_tensors(k, k_plan, number), values=_tensors(v, v_plan, number))
        yield _Segment(alone, layouts, k[name])


def unsupported_attention(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::attention_chunks``, or None."""
    a = AttentionArguments(*args, **kwargs)
    (keys, k_plan), (values, v_plan) = chunked(a.keys, a.k_plan), chunked(a.values, a.v_plan)
    if a.window:
        return f"a window of {a.window} tokens that lie in the order of their bits"
    for plan, dim in ((k_plan, int(a.q.shape[3])), (v_plan, int(values.codes.shape[3]))):
        if reason := _unsupported_segments(plan, dim):
            return reason
    for part in _segments(a):
        k, v = part.layouts
        if k.identity != v.identity:
            return f"a segment of {a.k_plan} and {a.v_plan} is exact in one of them only"
        if k.lanewise:
            return f"the groups of keys {a.k_plan} are too short at head_dim {a.q.shape[3]}"
    return (
        unsupported_query(a, keys.codes.shape[1])
        or unsupported_formats(a.q, keys, values)
        or unsupported_gaps(a.keys, a.k_plan)
        or unsupported_gaps(a.values, a.v_plan)
    )


@with_signature(AttentionArguments)
def attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.chunks.attention_chunks`, for arguments that are supported: a launch for each
    segment, and one that weighs all of their splits together."""
    return _attend(AttentionArguments(*args, **kwargs))


def _attend(a: AttentionArguments, advance: Advance | None = None) -> Tensor:
    """`attention_chunks`; ``advance``: of the last segment."""
    segments = list(_segments(a))
    kv_heads, value_dim = segments[0].arguments.keys[0].shape[1], segments[0].layouts[1].head_dim
    rows, pairs = most_rows(a, kv_heads), a.q.shape[0] * kv_heads
    sizes = [
        attention_sizes(*x.layouts, rows, pairs, x.arguments.keys[0].shape[2], a.q)
        for x in segments
    ]
    splits = [s.splits + s.edge_splits for s in sizes]
    sums = empty_sums(a.q, pairs, query_rows(a, kv_heads), value_dim, sum(splits))
    first = 0
    for x, size, count in zip(segments, sizes, splits, strict=True):
        launch_splits(
            x.arguments, x.layouts, size, sums, count, advance if x is segments[-1] else None,
            positions=x.positions, positions_count=x.positions.shape[1], window_size=0,
            # A step is exact: what is packed has come before it.
            CAUSAL=a.causal and x.layouts[0].identity, ALL_SPLITS=sum(splits), FIRST_SPLIT=first,
        )  # fmt: skip
        first += count
    return merged(a, x.layouts, size, sums, advance)


def unsupported_step(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append_attention_chunks``, or None."""
    step, a = StepArguments.split(*args, **kwargs)
    keys, values = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    if step.basis is not None:
        return "chunks are not rotated"
    return (
        unsupported_append(keys, step.new_keys, a.k_plan, step.cos_sin, step.rope)
        or unsupported_append(values, step.new_values, a.v_plan)
        or unsupported_attention(*a)
    )


@with_signature(StepArguments, AttentionArguments)
def append_attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.append_attention.append_attention_chunks`, for arguments that are
    supported."""
    step, a = StepArguments.split(*args, **kwargs)
    x = list(_segments(a))[-1]
    states, exact = (x.arguments.keys, x.arguments.values), parse_plan(str(FP))
    return _attend(a, append_both(step, states, (exact, exact), x.layouts))


def unsupported_unpack(
    state: Sequence[Tensor], tokens: int | torch.SymInt, plan: str, dtype: torch.dtype
) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::unpack_chunks``, or None."""
    s, p = chunked(state, plan)
    return (
        unsupported_conversion(s.codes, dtype)
        or unsupported_device(s.codes)
        or unsupported_heads(s.codes)
        or unsupported_dtype(s.codes, "the cache")
        or _unsupported_segments(p, int(s.codes.shape[3]))
        or unsupported_gaps(state, plan)
    )


def unpack_chunks(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """As `kvpass.ops.chunks.unpack_chunks`, for arguments that are supported."""
    s, p = chunked(state, plan)
    batch, heads, _, dim = s.codes.shape
    out = s.codes.new_empty((batch, heads, tokens, dim))
    for segment, name in enumerate(p.chunk_positions):
        layout, tensors = _layout(p, segment, dim), _tensors(s, p, segment)
        size, positions = decode_tokens(layout), s[name]
        launch(
            load_kernels("unpack", layout=layout).unpack_tokens,
            (-(-tensors[0].shape[2] // size), batch * heads),
            *tensors, positions, positions.shape[1], out, *rooms(tensors, layout), 0, tokens,
            KV_HEADS=heads, TOKENS=size, INLINE_ASM=on_nvidia(),
        )  # fmt: skip
    return out
