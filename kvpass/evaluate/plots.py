"""Plots of an evaluation (the extra kvpass[plot])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvpass.evaluate.results import Results

_COLUMNS = 4


def draw(found: Results, folder: str) -> list[str]:
    """Writes the plots that there are measurements for, and returns their paths."""
    paths = []
    drawings = {"pareto": _pareto, "depth": _depth, "needle": _needle}
    for name, drawing in drawings.items():
        if (figure := drawing(found)) is not None:
            paths.append(str(Path(folder) / f"{name}.png"))
            figure.savefig(paths[-1], dpi=150)
    return paths


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which none is less in both numbers, by the first."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _figure(rows: int, columns: int, width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _pareto(found: Results) -> Any:
    """Bits against divergence, and the front of what no other recipe beats in both."""
    if not found.ranks:
        return None
    figure, ((axes,),) = _figure(1, 1, 7, 4.5)
    points = []
    for i, rank in enumerate(found.ranks):
        x, y = found.quality[rank.name]["bits"], rank.value.mean
        points.append((x, y))
        axes.errorbar(
            x, y, rank.value.error, fmt="os^D"[i % 4], color=f"C{i % 10}", label=rank.name
        )
    # What stores everything exactly has no divergence, which a logarithm cannot show.
    axes.plot(*zip(*front([p for p in points if p[1] > 0]), strict=True), "--", color="grey",
              zorder=0, label="Pareto front")  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlabel=_bits_label(found), ylabel="divergence, nats per token")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bits_label(found: Results) -> str:
    tokens = next(iter(found.quality.values()))["cached"]
    return f"bits per element after {tokens:,} tokens, exact ones included"


def _depth(found: Results) -> Any:
    """Divergence in each bucket of context lengths, with standard errors."""
    if not found.ranks:
        return None
    figure, ((axes,),) = _figure(1, 1, 7, 4.5)
    edges = found.settings.edges
    middles = [math.sqrt(a * b) for a, b in pairwise(edges)]
    for i, rank in enumerate(found.ranks):
        values = [found.mean(rank.name, "kl", bucket) for bucket in range(len(middles))]
        # Beside each other, where errors would overlap.
        xs = [x * 1.012 ** (i - len(found.ranks) / 2) for x in middles]
        axes.errorbar(xs, [v.mean for v in values], [v.error for v in values], capsize=2,
                      marker="os^D"[i % 4], color=f"C{i % 10}", label=rank.name)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labels = [f"{a}-{b}" for a, b in pairwise(edges)]
    axes.set_xticks(middles, labels)
    axes.set(xlabel="tokens of context", ylabel="divergence, nats per token")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _needle(found: Results) -> Any:
    """The share of needles found, and the probability of the right answer, by length and depth."""
    names = [name for name in found.order if found.answered(name, "needle")]
    if not names:
        return None
    lengths, depths = found.settings.lengths or (), found.settings.depths
    rows = math.ceil(len(names) / _COLUMNS)
    figure, grid = _figure(rows, _COLUMNS, 2.6 * _COLUMNS, 0.8 + 2.1 * rows)
    image = None
    for axes, name in zip(grid.flat, names, strict=False):
        cells = _cells(found, name, lengths, depths)
        image = axes.imshow([[p for p, _ in row] for row in cells], vmin=0, vmax=1, cmap="viridis",
                            aspect="auto")  # fmt: skip
        for y, row in enumerate(cells):
            for x, (probability, right) in enumerate(row):
                colour = "black" if probability > 0.6 else "white"
                axes.text(x, y, f"{right:.0%}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(lengths)), map(str, lengths), fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=grid, label="probability of a token of the answer (geometric mean)")
    figure.suptitle(f"Needle: share answered, {found.settings.seeds} documents a cell", fontsize=10)
    return figure


def _cells(
    found: Results, name: str, lengths: Sequence[int], depths: Sequence[float]
) -> list[list[tuple[float, float]]]:
    """For each depth and length: the probability of a token of the answer, and the share right."""
    answers = found.answered(name, "needle")
    cells = []
    for depth in depths:
        own = [[a for (n, _, d), a in answers.items() if (n, d) == (length, depth)]
               for length in lengths]  # fmt: skip
        cells.append([
            (math.exp(sum(a.logprob for a in cell) / len(cell)),
             sum(a.right for a in cell) / len(cell))
            for cell in own
        ])  # fmt: skip
    return cells
