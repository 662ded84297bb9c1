"""``kvpass::unpack``: a packed cache tensor as the plain tensor it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.filters import restored
from kvpass.format.quantize import decode
from kvpass.format.state import State
from kvpass.ops.append import read_window, row_ends
from kvpass.ops.library import define
from kvpass.ops.pack import ring_runs
from kvpass.ops.rotary import read_rows

SCHEMA = "unpack(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack``.

    Args:
        state: see `kvpass.format.state.State`.
        tokens: logical length ``T`` of the handle. The last of the segment ends, unless a window
            slides (the last ``T`` tokens are wanted then) or the cache is static (what is not
            written yet is zero).
        plan: a printed `TensorPlan`.
        dtype: of the result.

    Returns:
        ``[B, H, T, D]``.
    """
    return unpacked(State.of(state, plan), tokens, dtype)


def unpacked(s: State, tokens: int, dtype: torch.dtype) -> Tensor:
    """`unpack`, of a state by its names."""
    p, ends, like = s.plan, row_ends(s.segment_ends), s.tokens
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
        out[:, :, exact - first : total - first] = read_window(s.window, exact, total)
    if p.rope is not None:
        rows = read_rows(s.cos_sin, first, total)
        out[:, :, : total - first] = p.rope.turn(out[:, :, : total - first], rows)
    out[:, :, total - first :] = 0
    return out


def read_packed(state: State, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Packed tokens ``first ... end``, decoded, or exact where a filter has kept them; not rotated
    by rotary embeddings."""
    plan, codec = state.plan, state.plan.codec
    g, parts = codec.token_group, []
    first, end = first - plan.sinks, end - plan.sinks
    # From the beginning of a group: its tokens share their params.
    start = first // g * g
    for slot, _, n in ring_runs(start, end - start, state.capacity):
        parts.append(decoded(state, slot, n, dtype))
    out = torch.cat(parts, dim=2)[:, :, first - start :]
    if not plan.retained:
        return out
    return restored(out, first + plan.sinks, state.retained, state.positions)


def decoded(state: State, slot: int, n: int, dtype: torch.dtype) -> Tensor:
    """The ``n`` packed tokens from ``slot`` on, both whole groups."""
    layout, codec = state.layout, state.plan.codec
    words = layout["codes"].tokens(state.codes, slot, n)
    if codec.identity:
        return words.to(dtype)
    qparams = state.qparams
    if not codec.static_ranges:
        qparams = layout["qparams"].tokens(qparams, slot, n)
    extra = layout["outliers"].tokens(state.outliers, slot, n) if codec.outliers else None
    return decode(codec, words, qparams, dtype, extra)


def unpack_fake(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Shape of `unpack`."""
    like = State.of(state, plan).tokens
    return like.new_empty((like.shape[0], like.shape[1], tokens, like.shape[3]), dtype=dtype)


define(SCHEMA, unpack, unpack_fake)
