"""``kvpass::unpack``: a packed cache tensor as the plain tensor it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.filters import with_retained
from kvpass.format.quantize import decode
from kvpass.format.state import State
from kvpass.ops.library import define
from kvpass.ops.ring import read_ring, ring_runs

SCHEMA = "unpack(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack``.

    Args:
        state: see `kvpass.format.state.State`.
        tokens: logical length ``T`` of the handle. The last of the segment ends, unless a window
            slides (the last ``T`` tokens are wanted then) or the cache is static (what is not
            written yet is zero).
        plan: a printed `TensorPlan`.
        dtype: the dtype of the result.

    Returns:
        ``[B, H, T, D]``.
    """
    return unpacked(State.of(state, plan), tokens, dtype)


def unpacked(s: State, tokens: int, dtype: torch.dtype) -> Tensor:
    """`unpack`, of a state by its names."""
    p, ends, like = s.plan, s.row_ends, s.tokens
    total = tokens if p.window_size is None else ends[-1]
    first = max(0, total - tokens)
    out = like.new_empty((*like.shape[:2], tokens, like.shape[3]), dtype=dtype)
    packed = min(ends[0] if p.codec.identity else ends[-2], total)
    start = first
    if p.sinks:
        # All tokens are wanted: no window slides.
        start = min(ends[0], total)
        out[:, :, :start] = s.sinks[:, :, :start]
    if packed > start:
        out[:, :, start - first : packed - first] = read_packed(s, start, packed, dtype)
    if not p.codec.identity:
        exact = max(packed, first)
        out[:, :, exact - first : total - first] = read_ring(s.window, exact, total)
    if p.rope is not None:
        cos_sin, keys = read_ring(s.cos_sin, first, total, dim=1), out[:, :, : total - first]
        out[:, :, : total - first] = p.rope.rotate(keys, cos_sin)
    out[:, :, total - first :] = 0
    return out


def read_packed(state: State, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Packed tokens ``first ... end``, decoded, or exact where a filter has retained them; not
    rotated by rotary embeddings."""
    plan, codec = state.plan, state.plan.codec
    first, end = first - plan.sinks, end - plan.sinks
    # From the beginning of a group: its tokens share their qparams.
    start = first // codec.token_group * codec.token_group
    runs = []
    for slot, _, n in ring_runs(start, end - start, state.capacity):
        fields = state.layout.encoded()
        parts = [state[f.name] if f.constant else f.tokens(state[f.name], slot, n) for f in fields]
        runs.append(decode(codec, parts, dtype))
    out = torch.cat(runs, dim=2)[:, :, first - start :]
    if not plan.retained:
        return out
    return with_retained(out, first + plan.sinks, state.retained, state.positions)


def unpack_fake(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Shape of `unpack`."""
    like = State.of(state, plan).tokens
    return like.new_empty((like.shape[0], like.shape[1], tokens, like.shape[3]), dtype=dtype)


define(SCHEMA, unpack, unpack_fake)
