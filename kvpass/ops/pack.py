"""``kvpass::pack``: the state of a cache tensor from the keys or values of a first prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.filters import empty_kept, keep
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.library import define

SCHEMA = "pack(Tensor new, str plan, Tensor? ranges=None) -> Tensor[]"


def empty_state(new: Tensor, plan: TensorPlan, tokens: int) -> list[Tensor]:
    """Unwritten state with room for ``tokens`` packed tokens shaped like ``new`` ``[B, H, T, D]``.

    Returns:
        The tensors that `TensorPlan.own_names` names: codes ``[B, H, C, W]`` (int16 words, or
        the model's dtype and ``W = D`` for the identity), params int32 or int16 (see
        `kvpass.cache.codec`), window ``[B, H, ring, D]``, whose slot ``t % ring`` holds token
        ``t`` (for how many, see `TensorPlan.slots`), sinks ``[B, H, S, D]``, the first ``S`` tokens
        where the plan has sinks, outliers int32 ``[B, C, N]`` of the packed tokens, where the codec
        has them, kept ``[B, H, N, D]`` and places, int32 ``[B, H, N]``, exact tokens and their
        positions (-1: none) where it has a filter, and ends,
        int32 ``[B, segments]``: the position at which each segment ends. Segment ``i`` holds tokens
        ``ends[i-1] ... ends[i]``, packed token ``t`` at slot ``(t - S) % C`` (``t - S`` itself,
        unless a window slides).
    """
    b, h, _, d = new.shape
    codec, c = plan.codec, plan.capacity(tokens)
    ends = new.new_empty((b, len(plan.segments)), dtype=torch.int32)
    if codec.identity:
        return [new.new_empty((b, h, c, d)), ends]
    codes = new.new_empty((b, h, c, codec.words(d)), dtype=torch.int16)
    shape = codec.groups.shape(b, h, c, d)
    shape = shape if codec.axis == "channel" else (*shape[:2], shape[3], shape[2])
    params = new.new_empty(shape, dtype=codec.param_dtype)
    ring = plan.slots(new.shape[2] - plan.sinks)
    exact = [new.new_empty((b, h, ring, d))]
    if plan.sinks:
        exact.append(new.new_empty((b, h, plan.sinks, d)))
    if codec.outliers:
        exact.append(new.new_empty((b, c, codec.outliers), dtype=torch.int32))
    if plan.kept:
        exact += empty_kept(new, plan.kept)
    return [codes, params, *exact, ends]


def ring_runs(start: int, count: int, ring: int) -> list[tuple[int, int, int]]:
    """Where ``count`` tokens from position ``start`` on go in a ring of slots.

    Returns:
        Contiguous runs: (slot, offset of the first token, tokens). Tokens that later ones of them
        overwrite are left out.
    """
    runs = []
    offset = max(0, count - ring)
    while offset < count:
        slot = (start + offset) % ring
        length = min(count - offset, ring - slot)
        runs.append((slot, offset, length))
        offset += length
    return runs


def write_packed(state: list[Tensor], plan: TensorPlan, start: int, x: Tensor) -> None:
    """Encodes tokens ``x`` ``[B, H, n, D]`` into the packed segment from position ``start`` on."""
    codec, codes = plan.codec, state[0]
    for slot, offset, n in ring_runs(start - plan.sinks, x.shape[2], codes.shape[2]):
        part = x[:, :, offset : offset + n]
        if codec.identity:
            codes[:, :, slot : slot + n] = part
            continue
        words, params, *extra = codec.encode(part, state[1] if codec.offline else None)
        codes[:, :, slot : slot + n] = words
        if codec.axis == "token":
            state[1][:, :, :, slot : slot + n] = params
        elif not codec.offline:
            g = codec.group
            state[1][:, :, slot // g : (slot + n) // g] = params
        if extra:
            outliers_of(state, plan)[:, slot : slot + n] = extra[0]
    if plan.residency.filter is not None:
        keep(state[-3], state[-2], plan.residency.filter, start, x)


def outliers_of(state: list[Tensor], plan: TensorPlan) -> Tensor:
    """The tensor of outliers in a state that has one."""
    return state[plan.own_names.index("outliers")]


def fill_sinks(state: list[Tensor], plan: TensorPlan, total: int, new: Tensor) -> Tensor:
    """Of the tokens ``new`` ``[B, H, n, D]`` behind ``total`` others, stores those that are sinks,
    and ends all segments behind them; returns the other new tokens."""
    count = min(max(plan.sinks - total, 0), new.shape[2])
    if count:
        state[3][:, :, total : total + count] = new[:, :, :count]
        state[-1].fill_(total + count)
    return new[:, :, count:]


def write_window(window: Tensor, start: int, x: Tensor) -> None:
    """Stores tokens ``x`` exactly, from position ``start`` on, in the ring ``[B, H, ring, D]``."""
    for slot, offset, n in ring_runs(start, x.shape[2], window.shape[2]):
        window[:, :, slot : slot + n] = x[:, :, offset : offset + n]


def pack(new: Tensor, plan: str, ranges: Tensor | None = None) -> list[Tensor]:
    """Reference of ``kvpass::pack``.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        plan: a printed `TensorPlan`.
        ranges: params ``[H, 1, D]`` of a codec whose ranges are calibrated.

    Returns:
        The state, see `empty_state`: whole flushes behind the sinks packed, the rest exact in the
        window. Where a window slides, positions count from the oldest flush that it still touches.
    """
    p = TensorPlan.parse(plan)
    p.one_codec()
    new = new[:, :, p.skipped(new.shape[2]) :]
    tokens = new.shape[2]
    packed = p.packed(tokens)
    state = empty_state(new, p, packed)
    if p.codec.offline:
        assert ranges is not None
        state[1].copy_(ranges)
    if p.sinks:
        new = fill_sinks(state, p, 0, new)
    first = tokens - new.shape[2]
    write_packed(state, p, first, new[:, :, :packed])
    if not p.codec.identity:
        write_window(state[2], first + packed, new[:, :, packed:])
        state[-1][:, -2] = first + packed
    state[-1][:, -1] = tokens
    return state


def pack_fake(new: Tensor, plan: str, ranges: Tensor | None = None) -> list[Tensor]:
    """Shapes of `pack`."""
    p, tokens = TensorPlan.parse(plan), new.shape[2]
    return empty_state(new, p, p.packed(tokens - p.skipped(tokens)))


define(SCHEMA, pack, pack_fake)
