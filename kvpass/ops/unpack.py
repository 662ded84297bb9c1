"""``kvpass::unpack``: a packed cache tensor as the plain tensor it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.filters import restored
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.append import read_window, row_ends
from kvpass.ops.library import define
from kvpass.ops.pack import outliers_of, ring_runs
from kvpass.ops.reorder_chunks import unpack_chunks
from kvpass.ops.rotary import read_rows

SCHEMA = "unpack(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack``.

    Args:
        state: see `kvpass.ops.pack.empty_state`; where a plan has levels,
            `kvpass.ops.reorder_chunks`.
        tokens: logical length ``T`` of the handle. The last of the segment ends, unless a window
            slides (the last ``T`` tokens are wanted then) or the cache is static (what is not
            written yet is zero).
        plan: a printed `TensorPlan`.
        dtype: of the result.

    Returns:
        ``[B, H, T, D]``.
    """
    p = TensorPlan.parse(plan)
    if p.levels:
        return unpack_chunks(state, p, tokens, dtype)
    ends = row_ends(state[-1])
    total = tokens if p.keep is None else ends[-1]
    first = max(0, total - tokens)
    like = state[0] if p.codec.identity else state[2]
    out = like.new_empty((*like.shape[:2], tokens, like.shape[3]), dtype=dtype)
    packed = min(ends[0] if p.codec.identity else ends[-2], total)
    start = first
    if p.sinks:
        # All tokens are wanted: no window slides.
        start = min(ends[0], total)
        out[:, :, :start] = state[3][:, :, :start]
    if packed > start:
        out[:, :, start - first : packed - first] = read_packed(state, p, start, packed, dtype)
    if not p.codec.identity:
        exact = max(packed, first)
        out[:, :, exact - first : total - first] = read_window(state[2], exact, total)
    if p.rope is not None:
        rows = read_rows(state[-2], first, total)
        out[:, :, : total - first] = p.rope.turn(out[:, :, : total - first], rows)
    out[:, :, total - first :] = 0
    return out


def read_packed(
    state: list[Tensor], plan: TensorPlan, first: int, end: int, dtype: torch.dtype
) -> Tensor:
    """Packed tokens ``first ... end``, decoded, or exact where a filter has kept them; not turned
    by rotary embeddings."""
    codes, codec = state[0], plan.codec
    g, parts = codec.token_group, []
    first, end = first - plan.sinks, end - plan.sinks
    # From the beginning of a group: its tokens share their params.
    start = first // g * g
    for slot, _, n in ring_runs(start, end - start, codes.shape[2]):
        words = codes[:, :, slot : slot + n]
        if codec.identity:
            parts.append(words.to(dtype))
            continue
        if codec.axis == "token":
            params = state[1][..., slot : slot + n]
        elif codec.offline:
            params = state[1]
        else:
            params = state[1][:, :, slot // g : (slot + n) // g]
        extra = outliers_of(state, plan)[:, slot : slot + n] if codec.outliers else None
        parts.append(codec.decode(words, params, dtype, extra))
    out = torch.cat(parts, dim=2)[:, :, first - start :]
    if not plan.kept:
        return out
    kept, places = (state[plan.state_names.index(name)] for name in ("kept", "places"))
    return restored(out, first + plan.sinks, kept, places)


def unpack_fake(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Shape of `unpack`."""
    like = state[0] if TensorPlan.parse(plan).codec.identity else state[2]
    return like.new_empty((like.shape[0], like.shape[1], tokens, like.shape[3]), dtype=dtype)


define(SCHEMA, unpack, unpack_fake)
