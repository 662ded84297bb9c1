"""Bytes of a cache against its tokens, computed from plans, and where they lie in a drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import kvpass.ops.cos_sin
import kvpass.ops.pack  # noqa: F401  (registers the op)
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.inspect.cells import Cell

LONGEST = 32_768
_STEPS = 32
# The plot's area in the drawing.
LEFT, TOP, WIDTH, HEIGHT = 70, 14, 600, 230


@dataclass(frozen=True)
class Point:
    """Bytes of the caches of one sequence of so many tokens: as the model keeps them in its own
    dtype, and packed."""

    tokens: int
    plain: int
    packed: int


def cache_points(cells: Sequence[Cell]) -> list[Point] | None:
    """Bytes at evenly spaced lengths; None if there is nothing to compute them from: a plan whose
    requests decide its bits, or a tensor that has no heads.

    As right after a prompt of that length. While tokens are generated the packed segment grows by a
    quarter at a time, so up to that much more may be spare.
    """
    tensors: Counter[tuple[TensorPlan | None, int, int, torch.dtype]] = Counter()
    for cell in cells:
        if cell.shape is None or isinstance(cell.plan, ChunkedPlan):
            return None
        tensors[cell.plan, int(cell.shape[1]), int(cell.shape[3]), cell.dtype] += 1
    rooms = [plan.room for plan, *_ in tensors if plan is not None and plan.room is not None]
    longest = min([LONGEST, *rooms])
    lengths = sorted({max(1, longest * i // _STEPS) for i in range(_STEPS + 1)})
    return [
        Point(
            n,
            sum(count * plain_bytes(*tensor, n) for tensor, count in tensors.items()),
            sum(count * packed_bytes(*tensor, n) for tensor, count in tensors.items())
            + _shared_bytes(cells, n),
        )
        for n in lengths
    ]


def plain_bytes(
    plan: TensorPlan | None, heads: int, channels: int, dtype: torch.dtype, tokens: int
) -> int:
    """Bytes of a plain cache tensor of as many tokens as ``plan`` keeps of ``tokens``."""
    kept = tokens if plan is None else plan.logical(tokens)
    return heads * channels * kept * dtype.itemsize


def packed_bytes(
    plan: TensorPlan | None, heads: int, channels: int, dtype: torch.dtype, tokens: int
) -> int:
    """Bytes of the state of a cache tensor after a prompt of ``tokens``; ``plan`` None: plain."""
    if plan is None:
        return plain_bytes(plan, heads, channels, dtype, tokens)
    # On the meta device this costs neither time nor memory.
    x = torch.empty(1, heads, tokens, channels, dtype=dtype, device="meta")
    return sum(part.nbytes for part in torch.ops.kvpass.pack(x, str(plan)))


def _shared_bytes(cells: Sequence[Cell], tokens: int) -> int:
    """Bytes of the cosines and sines that all layers share whose keys are rotated when read."""
    for cell in cells:
        if cell.plan is not None and cell.plan.rope is not None:
            size = (1, tokens, cell.plan.rope.channels)
            new = torch.empty(size, dtype=cell.dtype, device="meta")
            return int(torch.ops.kvpass.pack_cos_sin(new, str(cell.plan)).nbytes)
    return 0


@dataclass(frozen=True)
class Chart:
    """A drawing of `cache_points`.

    Attributes:
        points: what it shows.
        plain, packed: the lines, as SVG's ``points``.
        x_ticks, y_ticks: where they stand, and their texts.
    """

    points: tuple[Point, ...]
    plain: str
    packed: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def chart(points: Sequence[Point]) -> Chart:
    """The drawing of these points."""
    longest = points[-1].tokens
    most = max(max(point.plain, point.packed) for point in points)
    unit = next((u for u in _UNITS if most >= u[0]), _UNITS[-1])
    step = _step(most / unit[0] / 4)
    highest = step * -(-most // (step * unit[0])) * unit[0]

    def x(tokens: int) -> float:
        return round(LEFT + WIDTH * tokens / longest, 1)

    def y(size: float) -> float:
        return round(TOP + HEIGHT * (1 - size / highest), 1)

    return Chart(
        points=tuple(points),
        plain=" ".join(f"{x(p.tokens)},{y(p.plain)}" for p in points),
        packed=" ".join(f"{x(p.tokens)},{y(p.packed)}" for p in points),
        x_ticks=tuple((x(n), f"{n:,}") for n in (longest * i // 4 for i in range(5))),
        y_ticks=tuple(
            (y(i * step * unit[0]), f"{i * step:g} {unit[1]}" if i else "0")
            for i in range(int(highest / unit[0] / step + 0.5) + 1)
        ),
    )


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** (len(str(int(least))) - 1) if least >= 1 else 0.1
    return next((m * power for m in (1, 2, 5, 10) if m * power >= least), least)


def readable(size: int) -> str:
    """Bytes in the largest unit that they fill."""
    unit, name = next((u for u in _UNITS if size >= u[0]), _UNITS[-1])
    return f"{size / unit:,.4g} {name}"
