"""The ops of cache tensors with chunks of different bits whose tokens are spread over processes,
see `kvpass.format.sharded_plan.ShardedChunks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvpass.format.sharded_plan import ShardedChunks
from kvpass.format.state import State
from kvpass.ops import chunks
from kvpass.ops.append import APPEND_ARGUMENTS
from kvpass.ops.attention import ATTENTION_ARGUMENTS, AttentionArguments
from kvpass.ops.attention_partial import attention_partial_fake, partial_attention
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.shard import own_state
from kvpass.ops.unpack import unpack_fake

_SUFFIX = ShardedChunks.op_suffix


def sharded_chunks(state: Sequence[Tensor], plan: str) -> tuple[State, ShardedChunks]:
    """The state by its names, and the plan."""
    named = State.of(state, plan)
    return named, cast(ShardedChunks, named.plan)


def with_total(state: list[Tensor], plan: ShardedChunks, tokens: int) -> list[Tensor]:
    """The own tensors of a first prompt of so many tokens from those that `plan.own` names."""
    at = plan.layout.own_names.index("segment_ends")
    ends = state[at]
    total = ends.new_full((len(ends), 1), tokens)
    return [*state[:at], torch.cat([ends, total], dim=1), *state[at + 1 :]]


def set_counts(s: State, own: State, new: int) -> None:
    """Writes the ends of the own tokens, after ``new`` tokens of the whole sequence have come."""
    s.segment_ends[:, :-1] = own.segment_ends
    s.segment_ends[:, -1] += new


def reorder_chunks_shard(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """Reference of ``kvpass::reorder_chunks_shard``, see `kvpass.ops.chunks.reorder_chunks`; the
    index names the own tokens only."""
    _, p = sharded_chunks((), plan)
    own = chunks.reorder_chunks(new, scatter_index, str(p.own))
    return with_total(own, p, new.shape[2])


def extend_chunks_shard(
    state: list[Tensor], new: Tensor, scatter_index: list[Tensor], plan: str
) -> None:
    """Reference of ``kvpass::extend_chunks_shard``, see `kvpass.ops.chunks.extend_chunks`; the
    index names the own tokens only."""
    s, p = sharded_chunks(state, plan)
    own = own_state(s, p)
    chunks.extend_chunks(own.tensors, new, scatter_index, str(p.own))
    set_counts(s, own, new.shape[2])


def own_rows(
    s: State, p: ShardedChunks, new: Tensor, cos_sin: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The own ones of a decode step's tokens ``[B, H, n, D]``, and their cosines and sines."""
    past = s.length() if len(s.segment_ends) else 0
    rows = None if cos_sin is None else p.shard.select(cos_sin, 1, past)
    return p.shard.select(new, 2, past), rows


def append_chunks_shard(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """Reference of ``kvpass::append_chunks_shard``, see `kvpass.ops.chunks.append_chunks`."""
    s, p = sharded_chunks(state, plan)
    own, (mine, rows) = own_state(s, p), own_rows(s, p, new, cos_sin)
    if mine.shape[2]:
        chunks.append_chunks(own.tensors, mine, str(p.own), rows, rope, clip)
    set_counts(s, own, new.shape[2])


def attention_partial_chunks_shard(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::attention_partial_chunks_shard``: as
    `kvpass.ops.attention_partial.attention_partial`, of the own tokens; bounds are in the mask,
    whose columns are positions."""
    a = AttentionArguments(*args, **kwargs)
    (k, known), (v, _) = (chunks.in_slots(s, a.q.dtype) for s in a.states)
    held = (known >= 0)[:, None, None]
    mask = a.mask
    if mask is not None and mask.shape[3] > 1:
        rows = known.clamp(min=0)[:, None, None].expand(-1, *mask.shape[1:3], -1)
        mask = mask.expand(len(known), -1, -1, -1).gather(3, rows)
    if mask is None or mask.dtype == torch.bool:
        mask = held if mask is None else mask & held
    else:
        mask = mask.masked_fill(~held, -torch.inf)
    return partial_attention(a._replace(mask=mask), k, v)


def unpack_chunks_shard(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack_chunks_shard``, see `kvpass.ops.chunks.unpack_chunks`: zeros
    where another process holds a token."""
    s, p = sharded_chunks(state, plan)
    known = torch.cat(chunks.positions(s, p), dim=1)
    known = torch.where((known < 0) | (known >= tokens), tokens, known)
    held = known.new_zeros((len(known), tokens + 1), dtype=torch.bool).scatter(1, known, True)
    found = chunks.unpacked(s, tokens, dtype)
    return found.masked_fill_(~held[:, None, :tokens, None], 0)


def joined(parts: Tensor, plan: str) -> Tensor:
    """All tokens from what ``kvpass::unpack_chunks_shard`` gives on every process,
    ``[size * B, H, T, D]``: each token is held by one of them."""
    _, p = sharded_chunks((), plan)
    return torch.sum(parts.unflatten(0, (p.shard.size, -1)), 0)


define(
    chunks.REORDER.replace("reorder_chunks", f"reorder{_SUFFIX}"),
    reorder_chunks_shard,
    chunks.reorder_chunks_fake,
)
define(
    chunks.EXTEND.replace("extend_chunks", f"extend{_SUFFIX}"), extend_chunks_shard, returns_nothing
)
define(f"append{_SUFFIX}{APPEND_ARGUMENTS}", append_chunks_shard, returns_nothing)
define(
    f"attention_partial{_SUFFIX}{ATTENTION_ARGUMENTS}",
    attention_partial_chunks_shard,
    attention_partial_fake,
)
define(chunks.UNPACK.replace("unpack_chunks", f"unpack{_SUFFIX}"), unpack_chunks_shard, unpack_fake)
