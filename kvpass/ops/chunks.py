"""The ops of cache tensors whose prompts have chunks of different bits (Cocktail, section 3.2).

A prompt's tokens lie in the order of their bits: each codec of a `ChunkedPlan` has a segment of its
own, and exact tokens have the last one. A token's position is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.codec import Codec
from kvpass.format.quantize import decode, encode
from kvpass.format.state import State
from kvpass.ops.attention import (
    AttentionArguments,
    attention_fake,
    attention_schema,
    dense_attention,
)
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.rotary import rotated
from kvpass.ops.unpack import unpack_fake

REORDER = "reorder_chunks(Tensor new, Tensor[] slots, str plan) -> Tensor[]"
EXTEND = "extend_chunks(Tensor(a!)[] state, Tensor new, Tensor[] slots, str plan) -> ()"
APPEND = (
    "append_chunks(Tensor(a!)[] state, Tensor new, str plan, Tensor? rows=None, str? rope=None) "
    "-> ()"
)
UNPACK = "unpack_chunks(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"
# From a codec and whole groups of tokens to the fields of a segment.
Encode = Callable[[Codec, Tensor], Sequence[Tensor]]


def chunked(state: Sequence[Tensor], plan: str) -> tuple[State, ChunkedPlan]:
    """The state by its names, and the plan."""
    named = State.of(state, plan)
    assert isinstance(named.plan, ChunkedPlan)
    return named, named.plan


def reorder_chunks(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """Reference of ``kvpass::reorder_chunks``: a first prompt.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        slots: for each codec of the plan, then for exact tokens: which tokens go there, int32
            ``[B, tiles, TensorPlan.tile]``, each row's in rising order, -1 behind its end. Together
            they name every token once. Of a codec, every row has whole groups.
        plan: a printed `ChunkedPlan`.

    Returns:
        The state without positions, with as much room as there are slots.
    """
    return reordered(new, slots, plan, encoded)


def reordered(new: Tensor, slots: list[Tensor], plan: str, encode_as: Encode) -> list[Tensor]:
    """`reorder_chunks`, with what encodes whole groups of tokens."""
    _, p = chunked((), plan)
    found = {"segment_ends": _counts(slots)}
    for segment, (codec, places) in enumerate(zip(p.codecs, slots, strict=True)):
        parts = encode_as(codec, _taken(new, places))
        found |= dict(zip(p.segment_fields(segment), parts, strict=False))
    return [found[f.name] for f in p.layout.own]


def reorder_chunks_fake(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """Shapes of `reorder_chunks`."""
    _, p = chunked((), plan)
    room = [places.shape[1] * places.shape[2] for places in slots]
    sizes = p.chunk_sizes(new.shape, room)
    return [f.empty(new, sizes) for f in p.layout.own]


def extend_chunks(state: list[Tensor], new: Tensor, slots: list[Tensor], plan: str) -> None:
    """Reference of ``kvpass::extend_chunks``: a later prompt's tokens join each row's segments.

    Args:
        state: see `kvpass.format.chunked_plan`, without positions; with room.
        new, slots, plan: as of `reorder_chunks`.
    """
    s, p = chunked(state, plan)
    rows: list[list[int]] = s.segment_ends.tolist()
    counts = _counts(slots)
    counted: list[list[int]] = counts.tolist()
    for segment, (codec, places) in enumerate(zip(p.codecs, slots, strict=True)):
        parts = encoded(codec, _taken(new, places))
        for name, part in zip(p.segment_fields(segment), parts, strict=True):
            field = p.layout[name]
            for row, (ends, news) in enumerate(zip(rows, counted, strict=True)):
                into = field.tokens(s[name][row : row + 1], ends[segment], news[segment])
                into.copy_(field.tokens(part[row : row + 1], 0, news[segment]))
    s.segment_ends.add_(counts)


def _taken(new: Tensor, slots: Tensor) -> Tensor:
    """The tokens in ``slots`` ``[B, tiles, tile]`` as ``[B, H, N, D]``; any token where there is
    none."""
    index = slots.flatten(1).clamp(min=0).long()
    return new.gather(2, index[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def encoded(codec: Codec, tokens: Tensor) -> Sequence[Tensor]:
    """What the fields of a segment hold of ``tokens``."""
    return (tokens,) if codec.identity else encode(codec, tokens)


def _counts(slots: list[Tensor]) -> Tensor:
    return torch.stack([(s >= 0).sum((1, 2)) for s in slots], dim=1).to(torch.int32)


def append_chunks(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> None:
    """Reference of ``kvpass::append_chunks``, see `kvpass.ops.append.append`: the new tokens
    ``[B, H, n, D]`` of a decode step go behind each row's exact ones."""
    s, _ = chunked(state, plan)
    if rows is not None and rope is not None:
        new = rotated(new, rows, rope)
    # Without asking the device where.
    steps = torch.arange(new.shape[2], device=new.device)
    slots = s.segment_ends[:, -1:] + steps
    rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    s.codes.transpose(1, 2).index_put_((rows, slots), new.transpose(1, 2))
    s.segment_ends[:, -1] += new.shape[2]


def attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::attention_chunks``, see `kvpass.ops.attention.attention`. Attention
    knows no order of its tokens: in theirs the mask fits as it is."""
    a = AttentionArguments(*args, **kwargs)
    return dense_attention(a, *(_unpacked(s, s.length(), a.q.dtype) for s in a.states))


def positions(state: State, plan: ChunkedPlan) -> list[Tensor]:
    """The position of the token in each slot of each segment, int64 ``[B, C]``; -1 where there is
    none.

    Exact tokens without a position have come last, one behind the other.
    """
    found, ends = [], state.segment_ends.long()
    total = ends.sum(1, keepdim=True)
    for i, name in enumerate(plan.chunk_positions):
        places = state[name]
        room = state[plan.segment_fields(i)[0]].shape[2]
        end = ends[:, i : i + 1]
        slots = torch.arange(room, device=ends.device)
        known = torch.full((ends.shape[0], room), -1, device=ends.device)
        known[:, : places.shape[1]] = places[:, :room]
        if i == len(plan.chunk_codecs):
            known = torch.where(known < 0, total - end + slots, known)
        found.append(known.masked_fill(slots >= end, -1))
    return found


def unpack_chunks(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack_chunks``, see `kvpass.ops.unpack.unpack`: all tokens in their
    own order."""
    return _unpacked(State.of(state, plan), tokens, dtype)


def _unpacked(s: State, tokens: int, dtype: torch.dtype) -> Tensor:
    p = s.plan
    assert isinstance(p, ChunkedPlan)
    segments = range(len(p.codecs))
    parts = [_decoded(p.codecs[i], [s[n] for n in p.segment_fields(i)], dtype) for i in segments]
    stored = torch.cat(parts, dim=2)
    places = torch.cat(positions(s, p), dim=1)
    # Slots without a token go behind the last position.
    places = torch.where((places < 0) | (places >= tokens), tokens, places)
    slots = torch.arange(places.shape[1], device=places.device).expand_as(places)
    source = slots.new_zeros((places.shape[0], tokens + 1)).scatter(1, places, slots)[:, :tokens]
    index = source[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
    return stored.gather(2, index)


def decoded_chunk(state: State, plan: ChunkedPlan, segment: int, row: int, first: int) -> Tensor:
    """The tokens ``[H, chunk, D]`` of the chunk that begins at slot ``first`` of a row's segment,
    in float32 unless they are stored as they are."""
    names = plan.segment_fields(segment)
    parts = [plan.layout[n].tokens(state[n][row : row + 1], first, plan.chunk) for n in names]
    codec = plan.codecs[segment]
    return _decoded(codec, parts, parts[0].dtype if codec.identity else torch.float32)[0]


def _decoded(codec: Codec, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inverse of `encoded`."""
    return parts[0].to(dtype) if codec.identity else decode(codec, parts[0], parts[1], dtype)


define(REORDER, reorder_chunks, reorder_chunks_fake)
define(EXTEND, extend_chunks, returns_nothing)
define(APPEND, append_chunks, returns_nothing)
define(attention_schema("attention_chunks"), attention_chunks, attention_fake)
define(UNPACK, unpack_chunks, unpack_fake)
