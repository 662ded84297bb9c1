"""``kvpass::pack``: the state of a cache tensor from the keys or values of a first prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.residency import TensorPlan
from kvpass.ops.library import define

SCHEMA = "pack(Tensor new, str plan) -> Tensor[]"


def empty_state(new: Tensor, plan: TensorPlan, tokens: int) -> list[Tensor]:
    """Unwritten state with room for ``tokens`` packed tokens shaped like ``new`` ``[B, H, T, D]``.

    Returns:
        The tensors that `TensorPlan.state_names` names: codes ``[B, H, C, W]`` (int16 words, or
        the model's dtype and ``W = D`` for the identity), params int32 (see `kvpass.cache.codec`),
        window ``[B, H, ring, D]``, whose slot ``t % ring`` holds token ``t``, and ends, int32
        ``[B, segments]``: the position at which each segment ends. Segment ``i`` holds tokens
        ``ends[i-1] ... ends[i]``.
    """
    b, h, _, d = new.shape
    codec, c = plan.codec, plan.capacity(tokens)
    ends = new.new_empty((b, len(plan.segments)), dtype=torch.int32)
    if codec.identity:
        return [new.new_empty((b, h, c, d)), ends]
    codes = new.new_empty((b, h, c, codec.words(d)), dtype=torch.int16)
    shape = (b, h, c // codec.group, d) if codec.axis == "channel" else (b, h, d // codec.group, c)
    params = new.new_empty(shape, dtype=torch.int32)
    return [codes, params, new.new_empty((b, h, plan.ring, d)), ends]


def write_packed(state: list[Tensor], plan: TensorPlan, start: int, x: Tensor) -> None:
    """Encodes tokens ``x`` ``[B, H, n, D]`` into the packed segment from position ``start`` on."""
    codec, n = plan.codec, x.shape[2]
    if codec.identity:
        state[0][:, :, start : start + n] = x
        return
    words, params = codec.encode(x)
    state[0][:, :, start : start + n] = words
    if codec.axis == "channel":
        g = codec.group
        state[1][:, :, start // g : (start + n) // g] = params
    else:
        state[1][:, :, :, start : start + n] = params


def write_window(window: Tensor, start: int, x: Tensor) -> None:
    """Stores tokens ``x`` exactly, from position ``start`` on, in the ring ``[B, H, ring, D]``."""
    ring, n = window.shape[2], x.shape[2]
    first = start % ring
    head = min(n, ring - first)
    window[:, :, first : first + head] = x[:, :, :head]
    if head < n:
        window[:, :, : n - head] = x[:, :, head:]


def pack(new: Tensor, plan: str) -> list[Tensor]:
    """Reference of ``kvpass::pack``.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        plan: a printed `TensorPlan`.

    Returns:
        The state, see `empty_state`: whole flushes packed, the rest exact in the window.
    """
    p, tokens = TensorPlan.parse(plan), new.shape[2]
    packed = p.packed(tokens)
    state = empty_state(new, p, packed)
    write_packed(state, p, 0, new[:, :, :packed])
    if not p.codec.identity:
        write_window(state[2], packed, new[:, :, packed:])
        state[-1][:, 0] = packed
    state[-1][:, -1] = tokens
    return state


def pack_fake(new: Tensor, plan: str) -> list[Tensor]:
    """Shapes of `pack`."""
    p = TensorPlan.parse(plan)
    return empty_state(new, p, p.packed(new.shape[2]))


define(SCHEMA, pack, pack_fake)
