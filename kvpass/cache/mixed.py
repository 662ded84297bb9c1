"""What a `PackedKV` with chunks of several levels does without decoding; see
`kvpass.ops.reorder_chunks` for its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.reorder_chunks import positions, runs

if TYPE_CHECKING:
    from kvpass.cache.packed import PackedKV


def token_runs(plan: TensorPlan) -> dict[str, tuple[int, int]]:
    """Of each state tensor but the ends: the dimension of its tokens, and how many of them share an
    entry."""
    found = {"codes": (2, 1), **dict.fromkeys(plan.place_names, (1, 1))}
    for i, codec in enumerate(plan.levels):
        for name, run in zip((f"codes{i}", f"params{i}"), runs(codec), strict=False):
            found[name] = run
    return found


def with_places(made: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
    """The state, from what `kvpass.ops.reorder_chunks` makes and the places that all layers
    share."""
    return [*made[:-1], *places, made[-1]]


def resized(part: Tensor, dim: int, size: int) -> Tensor:
    """``part`` with room for ``size`` entries along ``dim``; new places are -1."""
    if part.shape[dim] >= size:
        return part
    shape = [*part.shape[:dim], size, *part.shape[dim + 1 :]]
    grown = part.new_full(shape, -1) if part.dim() == 2 else part.new_empty(shape)
    grown.narrow(dim, 0, part.shape[dim]).copy_(part)
    return grown


def reserve_levels(x: PackedKV, needed: Sequence[int], tile: int) -> None:
    """Makes room for so many tokens in each segment, in whole tiles."""
    found = token_runs(x.plan)
    for places, count in zip(x.plan.place_names, needed, strict=True):
        tokens = -(-count // tile) * tile
        for kind in ("codes", "params"):
            if (name := places.replace("places", kind)) in found:
                dim, group = found[name]
                setattr(x, name, resized(getattr(x, name), dim, tokens // group))
    x.mark_dynamic()


def bits_per_element(x: PackedKV) -> float:
    """See `PackedKV.bits_per_element`; `places`, which all layers share, do not count."""
    counts = x.ends.float().mean(0).tolist()
    exact = 8 * x.dtype.itemsize
    bits = exact * counts[-1]
    for codec, count in zip(x.plan.levels, counts, strict=False):
        each = exact if codec.identity else codec.bits_per_element(x.shape[3], x.shape[1])
        bits += each * count
    return float(bits / max(x.shape[2], 1) + 8 * x.ends.nbytes / max(x.numel(), 1))


def cropped(x: PackedKV, last: int) -> tuple[list[Tensor], int]:
    """The state of the first ``last`` tokens, and how many exact ones the longest row has.

    What is left of a chunk that is cut through is decoded, and exact from then on, behind the other
    exact ones: its tokens are the last.
    """
    plan, names = x.plan, x.plan.state_names
    state = [t.clone() for t in x.state]
    named = dict(zip(names, state, strict=True))
    kept = [(p >= 0) & (p < last) for p in positions(x.state, plan)]
    counts = torch.stack([k.sum(1) for k in kept], dim=1)
    rows: list[list[int]] = counts.tolist()
    most = max((row[-1] for row in rows), default=0) + plan.chunk
    exact = named["codes"] = resized(named["codes"], 2, most)
    for row, count in enumerate(rows):
        for i in range(len(plan.levels)):
            rest = count[i] % plan.chunk
            if rest:
                count[i] -= rest
                chunk = _chunk(named, plan, i, row, count[i])
                exact[row, :, count[-1] : count[-1] + rest] = chunk[:, :rest].to(exact.dtype)
                count[-1] += rest
    named["places"].masked_fill_(named["places"] >= last, -1)
    named["ends"].copy_(torch.tensor(rows, dtype=torch.int32).view(counts.shape))
    return [named[name] for name in names], max((row[-1] for row in rows), default=0)


def _chunk(named: dict[str, Tensor], plan: TensorPlan, level: int, row: int, first: int) -> Tensor:
    """The tokens ``[H, chunk, D]`` of the chunk that begins at slot ``first``."""
    codec, parts = plan.levels[level], []
    for name, (dim, group) in zip((f"codes{level}", f"params{level}"), runs(codec), strict=False):
        part = named[name][row : row + 1]
        parts.append(part.narrow(dim, first // group, plan.chunk // group))
    return (parts[0] if codec.identity else codec.decode(parts[0], parts[1], torch.float32))[0]


def joined_batch(tensors: Sequence[PackedKV]) -> list[Tensor]:
    """The state of all rows of ``tensors``, which have the same plan."""
    plan = tensors[0].plan
    found = []
    for name in plan.state_names:
        parts = [getattr(t, name) for t in tensors]
        if name != "ends":
            dim = token_runs(plan)[name][0]
            size = max(part.shape[dim] for part in parts)
            parts = [resized(part, dim, size) for part in parts]
        found.append(torch.cat(parts))
    return found
