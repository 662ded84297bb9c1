"""The ops of parts of sequences in C++: the own tokens as a cache tensor of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.format.sharded_plan import ShardedPlan
from kvpass.ops.attention import AttentionArguments
from kvpass.ops.chunk_shard import own_rows, set_counts, sharded_chunks, with_total
from kvpass.ops.chunks import positions
from kvpass.ops.shard import own_prompt, own_state, own_step, set_ends, sharded
from lowering.cpp import append, chunks, pack


def _own(plan: str) -> tuple[ShardedPlan, str]:
    """The plan, and that of its own tokens."""
    _, p = sharded((), plan)
    return p, str(p.own)


def unsupported_append(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_shard``, or None."""
    _, own = _own(plan)
    return append.unsupported_reason(state, new, own, cos_sin, rope, clip)


def append_shard(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """As `kvpass.ops.shard.append_shard`, for arguments that are supported."""
    s, p = sharded(state, plan)
    step = own_step(s, p, new, cos_sin)
    own, name = own_state(s, p), str(p.own)
    append.append(own.tensors, step.own, name, step.cos_sin, rope, clip, packed_end=step.packed_end)
    set_ends(s, step.ends)


def unsupported_pack(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::pack_shard``, or None."""
    _, own = _own(plan)
    return pack.unsupported_reason(new, own, ranges, clip)


def pack_shard(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """As `kvpass.ops.shard.pack_shard`, for arguments that are supported."""
    p, _ = _own(plan)
    state, packed, ends = own_prompt(p, new)
    pack.fill(state, p.shard.select(new, 2), packed, ranges)
    set_ends(state, ends)
    return state.tensors


def unsupported_reorder(new: Tensor, scatter_index: Sequence[Tensor], plan: str) -> str | None:
    """Why C++ declines these arguments of ``kvpass::reorder_chunks_shard``, or None."""
    _, p = sharded_chunks((), plan)
    return chunks.unsupported_reorder(new, scatter_index, str(p.own))


def reorder_chunks_shard(new: Tensor, scatter_index: list[Tensor], plan: str) -> list[Tensor]:
    """As `kvpass.ops.chunk_shard.reorder_chunks_shard`, for arguments that are supported."""
    _, p = sharded_chunks((), plan)
    own = chunks.reorder_chunks(new, scatter_index, str(p.own))
    return with_total(own, p, new.shape[2])


def unsupported_append_chunks(
    state: Sequence[Tensor], new: Tensor, plan: str, *rotation: Any
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_chunks_shard``, or None."""
    s, p = sharded_chunks(state, plan)
    return chunks.unsupported_append(own_state(s, p).tensors, new, str(p.own), *rotation)


def append_chunks_shard(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """As `kvpass.ops.chunk_shard.append_chunks_shard`, for arguments that are supported."""
    s, p = sharded_chunks(state, plan)
    own, (mine, rows) = own_state(s, p), own_rows(s, p, new, cos_sin)
    if mine.shape[2]:
        chunks.append_chunks(own.tensors, mine, str(p.own), rows, rope, clip)
    set_counts(s, own, new.shape[2])


def _own_arguments(a: AttentionArguments, known: bool) -> AttentionArguments:
    """The own tokens as cache tensors of their own; ``known``: with the position of each."""
    sides, plans = [], []
    for state, plan in ((a.keys, a.k_plan), (a.values, a.v_plan)):
        s, p = sharded_chunks(state, plan)
        own = own_state(s, p)
        names = p.own.layout.names
        tensors = [own[n] for n in names]
        if known:
            tensors[names.index("positions")] = positions(s, p)[-1].to(torch.int32)
        sides.append(tensors)
        plans.append(str(p.own))
    return a._replace(keys=sides[0], values=sides[1], k_plan=plans[0], v_plan=plans[1])


def unsupported_attention_chunks(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention_partial_chunks_shard``, or None."""
    own = _own_arguments(AttentionArguments(*args, **kwargs), known=False)
    return chunks.unsupported_segments(own, partial=True)


def attention_partial_chunks_shard(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.chunk_shard.attention_partial_chunks_shard`, for arguments that are
    supported."""
    a = AttentionArguments(*args, **kwargs)
    # Only masks ask for them.
    own = _own_arguments(a, known=a.mask is not None)
    return chunks.attend_segments(own, partial=True)
