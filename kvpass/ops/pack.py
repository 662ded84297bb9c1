"""``kvpass::pack``: the state of a cache tensor from the keys or values of a first prompt."""

from __future__ import annotations

from torch import Tensor

from kvpass.format.filters import retain
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import encode
from kvpass.format.state import State, empty_state
from kvpass.ops.library import define
from kvpass.ops.ring import ring_runs, write_ring

SCHEMA = "pack(Tensor new, str plan, Tensor? ranges=None, Tensor? clip=None) -> Tensor[]"


def write_packed(state: State, start: int, x: Tensor) -> None:
    """Encodes tokens ``x`` ``[B, H, n, D]`` into the packed segment from position ``start`` on."""
    plan, codec = state.plan, state.plan.codec
    ranges = state.qparams if codec.static_ranges else None
    for slot, offset, n in ring_runs(start - plan.sinks, x.shape[2], state.capacity):
        parts = encode(codec, x[:, :, offset : offset + n], ranges)
        for field, part in zip(state.layout.encoded(), parts, strict=True):
            if not field.constant:
                field.tokens(state[field.name], slot, n).copy_(part)
    if plan.retention.filter is not None:
        retain(state.retained, state.positions, plan.retention.filter, start, x)


def fill_sinks(state: State, total: int, new: Tensor) -> Tensor:
    """Stores those of the tokens ``new`` ``[B, H, n, D]`` behind ``total`` others that are sinks,
    and ends all segments behind them; returns the other new tokens."""
    count = min(max(state.plan.sinks - total, 0), new.shape[2])
    if count:
        state.sinks[:, :, total : total + count] = new[:, :, :count]
        state.segment_ends.fill_(total + count)
    return new[:, :, count:]


def pack(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """Reference of ``kvpass::pack``.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        plan: a printed `TensorPlan`.
        ranges: qparams ``[H, 1, D]`` of a codec whose ranges are calibrated.
        clip: see `kvpass.ops.append.append`.

    Returns:
        The state, see `kvpass.format.state.State`, without what all layers share: whole packed runs
        behind the sinks packed, the rest exact in the window. Where a window slides, positions
        count from the oldest packed run that it still touches.
    """
    p = parse_plan(plan)
    p.one_codec()
    new = new[:, :, p.skipped(new.shape[2]) :]
    packed = p.packed(new.shape[2])
    state = empty_state(new, p, packed)
    fill(state, new, packed, ranges)
    return state.tensors


def fill(state: State, new: Tensor, packed: int, ranges: Tensor | None) -> None:
    """Stores a first prompt's tokens ``new``, ``packed`` of them packed, in an empty state."""
    p, tokens = state.plan, new.shape[2]
    if p.codec.static_ranges:
        assert ranges is not None
        state.qparams.copy_(ranges)
    if p.sinks:
        new = fill_sinks(state, 0, new)
    first = tokens - new.shape[2]
    write_packed(state, first, new[:, :, :packed])
    if not p.codec.identity:
        write_ring(state.window, first + packed, new[:, :, packed:])
        state.segment_ends[:, -2] = first + packed
    state.segment_ends[:, -1] = tokens


def pack_fake(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """Shapes of `pack`."""
    p, tokens = parse_plan(plan), new.shape[2]
    return empty_state(new, p, p.packed(tokens - p.skipped(tokens))).tensors


define(SCHEMA, pack, pack_fake)
