"""``kvpass::append``: new tokens join a packed cache tensor, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.retention import MAX_STEP
from kvpass.format.state import State
from kvpass.ops.cos_sin import rotated
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pack import fill_sinks, write_packed
from kvpass.ops.ring import read_ring, write_ring

APPEND_ARGUMENTS = (
    "(Tensor(a!)[] state, Tensor new, str plan, Tensor? cos_sin=None, str? rope=None, "
    "Tensor? clip=None) -> ()"
)


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
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
        cos_sin: ``[B or 1, n, R]`` of new tokens that are keys before their rotary embedding, see
            `kvpass.format.rope.Rope`; None if nothing is to be rotated.
        rope: a printed `Rope`: how they are rotated before they are stored.
        clip: float32 ``[H * groups]``, the plan's factors of clipping if each group has its own;
            for kernels that cannot keep a tensor of them.
    """
    s, new = State.of(state, plan), rotated(new, cos_sin, rope)
    join(s, new)


def join(s: State, new: Tensor, packed_end: int | None = None) -> None:
    """`append` to a state by its names; ``packed_end``: where packed tokens then end, by default as
    the plan says."""
    p, n, ends = s.plan, new.shape[2], s.segment_ends
    if p.codec.identity:
        (total,) = s.row_ends
        write_packed(s, total, new)
        ends.fill_(total + n)
        return
    if p.sinks:
        new = fill_sinks(s, s.row_ends[-1], new)
    *_, packed, total = s.row_ends
    if packed_end is None:
        seen = total if n <= MAX_STEP else total + new.shape[2]
        packed_end = packed + p.retention.due(seen - packed, packed - p.sinks)
    due = packed_end - packed
    if packed_end <= total:
        oldest = read_ring(s.window, packed, packed_end)
        start, rest = total, new
    else:
        tail = torch.cat([read_ring(s.window, packed, total), new], dim=2)
        oldest = tail[:, :, :due]
        start, rest = packed_end, tail[:, :, due:]
    if due:
        write_packed(s, packed, oldest)
        # Before the window is written: an interrupt in between must not lose what was packed.
        ends[:, -2] = packed_end
    write_ring(s.window, start, rest)
    ends[:, -1] = total + new.shape[2]


define("append" + APPEND_ARGUMENTS, append, returns_nothing)
