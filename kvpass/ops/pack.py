"""``kvpass::pack``: the state of a cache tensor from the keys or values of a first prompt."""

from __future__ import annotations

from torch import Tensor

from kvpass.format.filters import keep
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import encode
from kvpass.format.state import State, empty_state
from kvpass.ops.library import define

SCHEMA = "pack(Tensor new, str plan, Tensor? ranges=None) -> Tensor[]"


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


def write_packed(state: State, start: int, x: Tensor) -> None:
    """Encodes tokens ``x`` ``[B, H, n, D]`` into the packed segment from position ``start`` on."""
    plan, layout = state.plan, state.layout
    for slot, offset, n in ring_runs(start - plan.sinks, x.shape[2], state.capacity):
        part = x[:, :, offset : offset + n]
        for name, encoded in _encoded(state, part).items():
            layout[name].tokens(state[name], slot, n).copy_(encoded)
    if plan.retention.filter is not None:
        keep(state.retained, state.positions, plan.retention.filter, start, x)


def _encoded(state: State, x: Tensor) -> dict[str, Tensor]:
    """What the fields of packed tokens hold of ``x``."""
    codec = state.plan.codec
    if codec.identity:
        return {"codes": x}
    if codec.static_ranges:
        words, _, *extra = encode(codec, x, state.qparams)
        found = {"codes": words}
    else:
        words, qparams, *extra = encode(codec, x)
        found = {"codes": words, "qparams": qparams}
    return found | dict(zip(("outliers",), extra, strict=False))


def fill_sinks(state: State, total: int, new: Tensor) -> Tensor:
    """Of the tokens ``new`` ``[B, H, n, D]`` behind ``total`` others, stores those that are sinks,
    and ends all segments behind them; returns the other new tokens."""
    count = min(max(state.plan.sinks - total, 0), new.shape[2])
    if count:
        state.sinks[:, :, total : total + count] = new[:, :, :count]
        state.segment_ends.fill_(total + count)
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
        The state, see `kvpass.format.state.State`, without what all layers share: whole packed runs
        behind the sinks packed, the rest exact in the window. Where a window slides, positions
        count from the oldest packed run that it still touches.
    """
    p = parse_plan(plan)
    p.one_codec()
    new = new[:, :, p.skipped(new.shape[2]) :]
    tokens = new.shape[2]
    packed = p.packed(tokens)
    state = empty_state(new, p, packed)
    if p.codec.static_ranges:
        assert ranges is not None
        state.qparams.copy_(ranges)
    if p.sinks:
        new = fill_sinks(state, 0, new)
    first = tokens - new.shape[2]
    write_packed(state, first, new[:, :, :packed])
    if not p.codec.identity:
        write_window(state.window, first + packed, new[:, :, packed:])
        state.segment_ends[:, -2] = first + packed
    state.segment_ends[:, -1] = tokens
    return state.tensors


def pack_fake(new: Tensor, plan: str, ranges: Tensor | None = None) -> list[Tensor]:
    """Shapes of `pack`."""
    p, tokens = parse_plan(plan), new.shape[2]
    return empty_state(new, p, p.packed(tokens - p.skipped(tokens))).tensors


define(SCHEMA, pack, pack_fake)
