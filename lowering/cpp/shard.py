"""The ops of parts of sequences in C++: the own tokens as a cache tensor of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass.format.sharded_plan import ShardedPlan
from kvpass.ops.shard import own_prompt, own_state, own_step, set_ends, sharded
from lowering.cpp import append, pack


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
