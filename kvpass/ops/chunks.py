"""The ops of cache tensors whose prompts have chunks of different bits (Cocktail, section 3.2).

A prompt's tokens lie in the order of their bits: each codec of a `ChunkedPlan` has a segment of its
own, and exact tokens have the last one. A token's position is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import FP, Codec
from kvpass.format.quantize import decode, encode
from kvpass.format.retention import RetentionPolicy
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.append import APPEND_ARGUMENTS
from kvpass.ops.attention import (
    ATTENTION_ARGUMENTS,
    AttentionArguments,
    attention_fake,
    dense_attention,
)
from kvpass.ops.cos_sin import rotated
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.unpack import unpack_fake

REORDER = "reorder_chunks(Tensor new, Tensor[] scatter_index, str plan) -> Tensor[]"
EXTEND = "extend_chunks(Tensor(a!)[] state, Tensor new, Tensor[] scatter_index, str plan) -> ()"
UNPACK = "unpack_chunks(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"
# From the number of a segment, a prompt [B, H, T, D] and which of its tokens are chosen, int32
# [B, tiles, tile], to the fields of that segment.
Encode = Callable[[int, Tensor, Tensor], Sequence[Tensor]]


def chunked(state: Sequence[Tensor], plan: str) -> tuple[State, ChunkedPlan]:
    """The state by its names, and the plan."""
    named = State.of(state, plan)
    return named, cast(ChunkedPlan, named.plan)


def segment_plan(codec: Codec) -> str:
    """The printed plan of one segment alone, all of whose tokens are packed."""
    return str(FP if codec.identity else TensorPlan(codec, RetentionPolicy(0, codec.token_group)))


def reorder_chunks(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """Reference of ``kvpass::reorder_chunks``: a first prompt.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        scatter_index: for each codec of the plan, then for exact tokens: which tokens go there,
            int32 ``[B, tiles, TensorPlan.tile]``, each row's in rising order, -1 behind its end.
            Together they name every token once. Of a codec, every row has whole groups.
        plan: a printed `ChunkedPlan`.

    Returns:
        The state without positions, with as much room as the index has slots.
    """
    _, p = chunked((), plan)
    return reordered(new, scatter_index, plan, partial(_encoded, p))


def _encoded(
    plan: ChunkedPlan, segment: int, new: Tensor, scatter_index: Tensor
) -> Sequence[Tensor]:
    return encode(plan.codecs[segment], chosen(new, scatter_index))


def reordered(
    new: Tensor, scatter_index: list[Tensor], plan: str, encode_as: Encode
) -> list[Tensor]:
    """`reorder_chunks`, with what encodes the tokens of a segment."""
    _, p = chunked((), plan)
    found = {"segment_ends": chosen_counts(scatter_index)}
    for segment, index in enumerate(scatter_index):
        parts = encode_as(segment, new, index)
        found |= zip(p.segment_fields(segment), parts, strict=True)
    return [found[name] for name in p.layout.own_names]


def reorder_chunks_fake(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """Shapes of `reorder_chunks`."""
    _, p = chunked((), plan)
    sizes = p.chunk_sizes(new.shape, [index.shape[1] * index.shape[2] for index in scatter_index])
    return [f.empty(new, sizes) for f in p.layout.own]


def extend_chunks(state: list[Tensor], new: Tensor, scatter_index: list[Tensor], plan: str) -> None:
    """Reference of ``kvpass::extend_chunks``: a later prompt's tokens join each row's segments.

    Args:
        state: see `kvpass.format.chunked_plan`, without positions; with room.
        new, scatter_index, plan: as of `reorder_chunks`.
    """
    s, p = chunked(state, plan)
    counts = chosen_counts(scatter_index)
    for segment, index in enumerate(scatter_index):
        rows = list(
            zip(s.segment_ends[:, segment].tolist(), counts[:, segment].tolist(), strict=True)
        )
        parts = _encoded(p, segment, new, index)
        for name, part in zip(p.segment_fields(segment), parts, strict=True):
            field = p.layout[name]
            for row, (end, count) in enumerate(rows):
                into = field.tokens(s[name][row : row + 1], end, count)
                into.copy_(field.tokens(part[row : row + 1], 0, count))
    s.segment_ends.add_(counts)


def chosen(new: Tensor, scatter_index: Tensor) -> Tensor:
    """The tokens of a segment as ``[B, H, N, D]``; any token where the index has none."""
    tokens = scatter_index.flatten(1).clamp(min=0).long()
    return new.gather(2, tokens[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def chosen_counts(scatter_index: list[Tensor]) -> Tensor:
    """The tokens of each row and segment, int32 ``[B, segments]``."""
    return torch.stack([(i >= 0).sum((1, 2)) for i in scatter_index], dim=1).to(torch.int32)


def append_chunks(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """Reference of ``kvpass::append_chunks``, see `kvpass.ops.append.append`: the new tokens
    ``[B, H, n, D]`` of a decode step go behind each row's exact ones."""
    s, new = State.of(state, plan), rotated(new, cos_sin, rope)
    # Without asking the device where.
    slots = s.segment_ends[:, -1:] + torch.arange(new.shape[2], device=new.device)
    rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    s.codes.transpose(1, 2).index_put_((rows, slots), new.transpose(1, 2))
    s.segment_ends[:, -1] += new.shape[2]


def attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::attention_chunks``, see `kvpass.ops.attention.attention`. Attention
    knows no order of its tokens: in theirs the mask fits as it is."""
    a = AttentionArguments(*args, **kwargs)
    return dense_attention(a, *(unpacked(s, s.length(), a.q.dtype) for s in a.states))


def positions(state: State, plan: ChunkedPlan) -> list[Tensor]:
    """The position of the token in each slot of each segment, int64 ``[B, C]``; -1 where there is
    none.

    Exact tokens without a position have come last, one behind the other.
    """
    found, ends = [], state.segment_ends.long()
    for segment, name in enumerate(plan.chunk_positions):
        end, stored = ends[:, segment : segment + 1], state[name]
        room = state[plan.segment_fields(segment)[0]].shape[2]
        slots = torch.arange(room, device=ends.device)
        known = torch.full((len(ends), room), -1, device=ends.device)
        known[:, : stored.shape[1]] = stored[:, :room]
        if segment == len(plan.chunk_codecs):
            known = torch.where(known < 0, plan.last_positions(ends, slots), known)
        found.append(known.masked_fill(slots >= end, -1))
    return found


def unpack_chunks(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack_chunks``, see `kvpass.ops.unpack.unpack`: all tokens in their
    own order."""
    return unpacked(State.of(state, plan), tokens, dtype)


def unpacked(s: State, tokens: int, dtype: torch.dtype) -> Tensor:
    """The tokens of a state in their own order, ``[B, H, tokens, D]``; any where none is held."""
    stored, known = in_slots(s, dtype)
    # Slots without a token go behind the last position.
    known = torch.where((known < 0) | (known >= tokens), tokens, known)
    slots = torch.arange(known.shape[1], device=known.device).expand_as(known)
    source = slots.new_zeros((len(known), tokens + 1)).scatter(1, known, slots)[:, :tokens]
    index = source[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
    return stored.gather(2, index)


def in_slots(s: State, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tokens ``[B, H, N, D]`` in the order of their slots, and their `positions` ``[B, N]``."""
    p = cast(ChunkedPlan, s.plan)
    stored = [
        decode(codec, [s[name] for name in p.segment_fields(segment)], dtype)
        for segment, codec in enumerate(p.codecs)
    ]
    return torch.cat(stored, dim=2), torch.cat(positions(s, p), dim=1)


def decoded_chunk(state: State, plan: ChunkedPlan, segment: int, row: int, first: int) -> Tensor:
    """The tokens ``[H, chunk, D]`` of the chunk that begins at slot ``first`` of a row's segment,
    in float32 unless they are stored as they are."""
    names = plan.segment_fields(segment)
    parts = [plan.layout[n].tokens(state[n][row : row + 1], first, plan.chunk) for n in names]
    codec = plan.codecs[segment]
    return decode(codec, parts, parts[0].dtype if codec.identity else torch.float32)[0]


define(REORDER, reorder_chunks, reorder_chunks_fake)
define(EXTEND, extend_chunks, returns_nothing)
define("append_chunks" + APPEND_ARGUMENTS, append_chunks, returns_nothing)
define("attention_chunks" + ATTENTION_ARGUMENTS, attention_chunks, attention_fake)
define(UNPACK, unpack_chunks, unpack_fake)
