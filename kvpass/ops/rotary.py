"""``kvpass::pack_rotary`` and ``kvpass::append_rotary``: cosines and sines of cached tokens;
``kvpass::keep_rows``: those of new ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.ops.library import define, returns_nothing

PACK = "pack_rotary(Tensor rows, str plan) -> Tensor"
KEEP = "keep_rows(Tensor rows) -> Tensor"
APPEND = "append_rotary(Tensor(a!) rotary, Tensor rows, Tensor ends, str plan) -> ()"


def pack_rotary(rows: Tensor, plan: str) -> Tensor:
    """Reference of ``kvpass::pack_rotary``.

    Args:
        rows: of a first prompt's tokens, ``[B or 1, T, R]``, see `kvpass.format.rope.Rope`.
        plan: a printed `TensorPlan` of the keys; those of all layers count tokens alike.

    Returns:
        ``[B or 1, C, R]``, the row of the token at position ``t`` at ``t % C``.
    """
    p = parse_plan(plan)
    rows = rows[:, p.skipped(rows.shape[1]) :]
    rotary = pack_rotary_fake(rows, plan)
    rotary[:, : rows.shape[1]] = rows
    return rotary


def pack_rotary_fake(rows: Tensor, plan: str) -> Tensor:
    """Shape of `pack_rotary`."""
    p, tokens = parse_plan(plan), rows.shape[1]
    room = p.capacity(tokens - p.skipped(tokens))
    return rows.new_empty((rows.shape[0], room, rows.shape[2]))


def append_rotary(rotary: Tensor, rows: Tensor, ends: Tensor, plan: str) -> None:
    """Reference of ``kvpass::append_rotary``: the rows of the new tokens of a step, in place.

    Args:
        rotary: see `pack_rotary`; with room for them.
        rows: ``[B or 1, n, R]``.
        ends: of one of the layers, before it is extended; every sequence of a batch has the same.
        plan: a printed `TensorPlan`.
    """
    count = min(rows.shape[1], rotary.shape[1])
    first = rows.shape[1] - count
    if ends.numel():
        # Without asking the device for the position.
        slots = ends[0, -1] + torch.arange(first, first + count, device=rows.device)
        rotary.index_copy_(1, slots % rotary.shape[1], rows[:, first:])


def read_rows(rotary: Tensor, start: int, end: int) -> Tensor:
    """The rows of positions ``start ... end``."""
    slots = torch.arange(start, end, device=rotary.device) % rotary.shape[1]
    return rotary.index_select(1, slots)


def rotated(x: Tensor, rows: Tensor, rope: str) -> Tensor:
    """Keys ``x`` ``[B, H, n, D]`` as their rotary embedding leaves them, see `Rope.turn`."""
    return Rope.parse(rope).turn(x, rows)


def keep_rows(rows: Tensor) -> Tensor:
    """Reference of ``kvpass::keep_rows``: a copy of the rows ``[B or 1, n, R]``, contiguous, which
    a graph computes once for all layers. (Inductor computes what it can anew for every reader.)"""
    return rows.clone(memory_format=torch.contiguous_format)


def keep_rows_fake(rows: Tensor) -> Tensor:
    """Shape of `keep_rows`."""
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


define(KEEP, keep_rows, keep_rows_fake)
define(PACK, pack_rotary, pack_rotary_fake)
define(APPEND, append_rotary, returns_nothing)
