"""``kvpass::append``: new tokens join a packed cache tensor, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.retention import MAX_STEP
from kvpass.format.state import State
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pack import fill_sinks, write_packed, write_window
from kvpass.ops.rotary import rotated

SCHEMA = "append(Tensor(a!)[] state, Tensor new, str plan, Tensor? rows=None, str? rope=None) -> ()"


def read_window(window: Tensor, start: int, end: int) -> Tensor:
    """Tokens ``start ... end`` of the ring ``[B, H, ring, D]``, in order."""
    ring = window.shape[2]
    slots = torch.arange(start, end, device=window.device) % ring
    return window.index_select(2, slots)


def row_ends(ends: Tensor) -> list[int]:
    """Segment ends of the batch. Every sequence of a batch has the same ones."""
    rows: list[list[int]] = ends.tolist()
    return rows[0] if rows else [0] * ends.shape[1]


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> None:
    """Reference of ``kvpass::append``.

    A step of up to `MAX_STEP` tokens first packs what was already due and then stores the new
    tokens exactly, so that a token is attended exactly in its own step. A longer step has been
    attended already; it packs everything that is due with the new tokens counted. Sinks are filled
    first. Cost is O(new tokens).

    Args:
        state: see `kvpass.format.state.State`, without what all layers share; room for the packed
            tokens must exist.
        new: ``[B, H, n, D]``.
        plan: a printed `TensorPlan`.
        rows: ``[B or 1, n, R]`` of new tokens that are keys before their rotary embedding, see
            `kvpass.format.rope.Rope`; None if nothing is to be rotated.
        rope: a printed `Rope`: how they are rotated before they are stored.
    """
    if rows is not None and rope is not None:
        new = rotated(new, rows, rope)
    s, n = State.of(state, plan), new.shape[2]
    p, ends = s.plan, s.segment_ends
    if p.codec.identity:
        (total,) = row_ends(ends)
        write_packed(s, total, new)
        ends.fill_(total + n)
        return
    if p.sinks:
        new = fill_sinks(s, row_ends(ends)[-1], new)
    *_, packed, total = row_ends(ends)
    window = s.window
    if n <= MAX_STEP:
        due = p.retention.due(total - packed, packed - p.sinks)
        oldest = read_window(window, packed, packed + due)
        start, rest = total, new
    else:
        tail = torch.cat([read_window(window, packed, total), new], dim=2)
        due = p.retention.due(tail.shape[2], packed - p.sinks)
        oldest = tail[:, :, :due]
        start, rest = packed + due, tail[:, :, due:]
    if due:
        write_packed(s, packed, oldest)
        # Before the window is written: an interrupt in between must not lose what was packed.
        ends[:, -2] = packed + due
    write_window(window, start, rest)
    ends[:, -1] = total + new.shape[2]


define(SCHEMA, append, returns_nothing)
