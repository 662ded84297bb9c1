"""Copies of a state whose rows share what they can, see `kvpass.tensor.rows`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvpass.format.layout import Field
from kvpass.format.state import StateTensors
from kvpass.format.tensor_plan import TensorPlan
from kvpass.tensor.rows import PAGE, Prefix, Rows, token_dim


def copied(
    x: StateTensors,
    written: int,
    old: Rows | None,
    index: Tensor | None,
    stored: int,
    room: int | None = None,
) -> tuple[list[Tensor], Rows | None]:
    """A copy of the state of ``x``, and how its rows begin; None: they share nothing.

    Args:
        x: the state.
        written: where its last segment ends.
        old: how its rows begin.
        index: of the rows that are wanted, int64 ``[N]``; None: all.
        stored: how many packed tokens of it are wanted.
        room: for so many packed tokens; None: what it has, or more.
    """
    try:
        shared, rows = _shared(x, written, old, index, max(0, stored), room)
    except OSError:
        # Without more files or mappings from the system, as without a system that has them.
        shared, rows = {}, None
    state = []
    for name, field in x.plan.layout.by_name.items():
        tensor = getattr(x, name)
        # All sequences of a batch may have the same cosines and sines.
        whole = index is None or (field.shape[0] == "rows" and len(tensor) == 1)
        if name not in shared:
            shared[name] = tensor.clone() if whole else tensor.index_select(0, index)
        state.append(shared[name])
    return state, rows


def _shared(
    x: StateTensors,
    written: int,
    old: Rows | None,
    index: Tensor | None,
    stored: int,
    room: int | None,
) -> tuple[dict[str, Tensor], Rows | None]:
    """What `copied` returns, without those tensors of which rows share nothing.

    Raises:
        OSError: if the system gives no more files, memory or mappings.
    """
    plan, fields = x.plan, [f for f in x.plan.layout.own if f.grows == "capacity"]
    grows = type(plan) is TensorPlan and plan.room is None and plan.window_size is None
    if not grows or not x.segment_ends.is_cpu or not sys.platform.startswith("linux"):
        return {}, None
    wanted = list(range(len(x.segment_ends))) if index is None else index.tolist()
    origins = wanted if old is None else [old.origins[i] for i in wanted]
    common = stored if old is None else min(stored, old.common)
    if len(set(origins)) == len(origins) or not _saves(x, fields, common):
        return {}, None
    if old is not None and room is None:
        rows = replace(old.after(stored, written), origins=tuple(origins))
    else:
        exact = range(written, written) if old is None else old.after(stored, written).exact
        # Of each beginning the first row that has it.
        first = {origin: wanted[origins.index(origin)] for origin in origins}
        room = stored + max(stored // 4, 2 * plan.tile) if room is None else room
        prefix = _prefix(x, fields, torch.tensor(list(first.values())), common, room)
        numbers = {origin: number for number, origin in enumerate(first)}
        rows = Rows(prefix, tuple(numbers[origin] for origin in origins), common, exact)
    shared, select = {}, torch.tensor(wanted)
    for field in (f for f in plan.layout.own if f.name in rows.prefix):
        tensor, own = getattr(x, field.name), rows.own(field, getattr(x, field.name), stored)
        dim = token_dim(field)
        if field.grows is None and 2 * sum(n for _, n in own) > tensor.shape[dim]:
            continue
        new = rows.prefix.tensor(field.name, rows.origins, tensor.dtype)
        for start, n in own:
            new.narrow(dim, start, n).copy_(tensor.narrow(dim, start, n)[select])
        shared[field.name] = new
    return shared, rows


def _prefix(
    x: StateTensors, fields: Sequence[Field], first: Tensor, common: int, room: int
) -> Prefix:
    """What rows ``first`` of ``x`` begin with: ``common`` packed tokens, with room for as many as
    ``room`` at least, and the exact tokens that have whole pages.

    Raises:
        OSError: if the system gives no more files or memory.
    """
    tile, tensors, shapes = _tile(x, fields), {}, {}
    for field in x.plan.layout.own:
        tensor, dim = getattr(x, field.name), token_dim(field)
        if field in fields:
            kept, entries = between(field, tensor, 0, common), -(-room // tile) * tile
            shape = (*tensor.shape[1:dim], entries // field.group, *tensor.shape[dim + 1 :])
        elif field.name in ("window", "sinks") and field.grows is None:
            kept, shape = tensor, tensor.shape[1:]
            if math.prod(shape) * tensor.element_size() % PAGE:
                continue
        else:
            continue
        tensors[field.name], shapes[field.name] = kept[first], (len(first), *shape)
    return Prefix(tensors, shapes)


def between(field: Field, tensor: Tensor, first: int, end: int) -> Tensor:
    """The entries of tokens ``first ... end``, of which the former is the first of a group."""
    start = first // field.group
    return tensor.narrow(field.token_dim, start, -(-end // field.group) - start)


def _saves(x: StateTensors, fields: Sequence[Field], common: int) -> bool:
    """Whether rows hold less by sharing ``common`` tokens: where those of a head end, each row has
    a page for itself."""
    row: dict[Field, Tensor] = {field: getattr(x, field.name)[:1] for field in fields}
    saved = sum(between(field, tensor, 0, common).nbytes for field, tensor in row.items())
    return saved > 2 * PAGE * sum(math.prod(t.shape[: f.token_dim]) for f, t in row.items())


def _tile(x: StateTensors, fields: Sequence[Field]) -> int:
    """Rows with room for a multiple of so many tokens are whole pages."""
    tile = x.plan.tile
    nbytes = [field.tokens(getattr(x, field.name)[:1], 0, tile).nbytes for field in fields]
    return math.lcm(*(tile * (PAGE // math.gcd(PAGE, n)) for n in nbytes))
