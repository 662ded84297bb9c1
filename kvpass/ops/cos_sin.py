"""Cosines and sines of the positions of cached tokens, one tensor for all layers:
``kvpass::pack_cos_sin``, ``kvpass::append_cos_sin``; ``kvpass::copy_cos_sin``: those of new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.format.sharded_plan import ShardedPlan
from kvpass.ops.library import define, returns_nothing

PACK = "pack_cos_sin(Tensor new, str plan) -> Tensor"
APPEND = "append_cos_sin(Tensor(a!) cos_sin, Tensor new, Tensor ends, str plan) -> ()"
COPY = "copy_cos_sin(Tensor new) -> Tensor"


def pack_cos_sin(new: Tensor, plan: str) -> Tensor:
    """Reference of ``kvpass::pack_cos_sin``.

    Args:
        new: ``[B or 1, T, R]`` of a first prompt's tokens, see `kvpass.format.rope.Rope`.
        plan: a printed `TensorPlan` of the keys; those of all layers count tokens alike.

    Returns:
        ``[B or 1, C, R]``, those of position ``t`` at ``t % C``; of a `ShardedPlan` those of the
        own tokens, in their order.
    """
    p, cos_sin = parse_plan(plan), pack_cos_sin_fake(new, plan)
    new = new[:, p.skipped(new.shape[1]) :]
    if isinstance(p, ShardedPlan):
        new = p.shard.select(new, 1)
    cos_sin[:, : new.shape[1]] = new
    return cos_sin


def pack_cos_sin_fake(new: Tensor, plan: str) -> Tensor:
    """Shape of `pack_cos_sin`."""
    p, (rows, tokens, channels) = parse_plan(plan), new.shape
    kept = p.shard.own(tokens) if isinstance(p, ShardedPlan) else tokens - p.skipped(tokens)
    return new.new_empty((rows, p.capacity(kept), channels))


def append_cos_sin(cos_sin: Tensor, new: Tensor, ends: Tensor, plan: str) -> None:
    """Reference of ``kvpass::append_cos_sin``: those of the new tokens of a step, in place.

    Args:
        cos_sin: see `pack_cos_sin`; with room for them.
        new: ``[B or 1, n, R]``.
        ends: the segment ends of one of the layers, before it is extended.
        plan: a printed `TensorPlan`.
    """
    p = parse_plan(plan)
    if isinstance(p, ShardedPlan) and ends.numel():
        start = int(ends[0, -1])
        own, first = p.shard.select(new, 1, start), p.shard.own(start)
        cos_sin[:, first : first + own.shape[1]] = own
        return
    count = min(new.shape[1], cos_sin.shape[1])
    first = new.shape[1] - count
    if ends.numel():
        # Without asking the device for the position.
        slots = ends[0, -1] + torch.arange(first, first + count, device=new.device)
        cos_sin.index_copy_(1, slots % cos_sin.shape[1], new[:, first:])


def rotated(x: Tensor, cos_sin: Tensor | None, rope: str | None) -> Tensor:
    """Keys ``x`` ``[B, H, n, D]`` as their rotary embedding leaves them, see `Rope.rotate`; ``x``
    if there is none to be applied."""
    return x if cos_sin is None or rope is None else Rope.parse(rope).rotate(x, cos_sin)


def copy_cos_sin(new: Tensor) -> Tensor:
    """Reference of ``kvpass::copy_cos_sin``: a copy of ``[B or 1, n, R]``, contiguous, which a
    graph computes once for all layers. (Inductor computes what it can anew for every reader.)"""
    return new.clone(memory_format=torch.contiguous_format)


def copy_cos_sin_fake(new: Tensor) -> Tensor:
    """Shape of `copy_cos_sin`."""
    return torch.empty_like(new, memory_format=torch.contiguous_format)


define(PACK, pack_cos_sin, pack_cos_sin_fake)
define(APPEND, append_cos_sin, returns_nothing)
define(COPY, copy_cos_sin, copy_cos_sin_fake)
