"""Plots of an evaluation (the extra kvpass[plot])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvpass.evaluate.results import Results

_COLUMNS = 4
_MARKERS = "os^D"
# Nats per token: what differs by less differs by rounding, and would stretch a logarithmic axis.
_LEAST = 1e-7


def draw(found: Results, folder: str) -> list[str]:
    """Writes the plots that there are measurements for, and returns their paths."""
    paths = []
    drawings = {"pareto": _pareto, "depth": _depth} if _diverging(found) else {}
    for name, drawing in (drawings | {"needle": _needle}).items():
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
    figure, ((axes,),) = _figure(1, 1, 8, 4.5)
    points = []
    for i, name in enumerate(_diverging(found)):
        value, _ = found.ranks[name]
        points.append((found.quality[name]["bits"], value.mean))
        _errors(axes, i, name, [points[-1][0]], [value])
    axes.plot(*zip(*front(points), strict=True), "--", color="grey", zorder=0, label="Pareto front")
    tokens = next(iter(found.quality.values()))["cached"]
    axes.set_xlabel(f"bits per element after {tokens:,} tokens, exact ones included")
    return _finished(figure, axes, found)


def _depth(found: Results) -> Any:
    """Divergence in each bucket of context lengths, with standard errors."""
    figure, ((axes,),) = _figure(1, 1, 8, 4.5)
    edges = found.settings.edges
    middles = [math.sqrt(a * b) for a, b in pairwise(edges)]
    for i, name in enumerate(_diverging(found)):
        values = [found.mean(name, "kl", bucket) for bucket in range(len(middles))]
        # Beside each other, where errors would overlap.
        _errors(axes, i, name, [x * 1.01 ** (i - len(found.ranks) / 2) for x in middles], values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(middles, [f"{a}-{b}" for a, b in pairwise(edges)])
    axes.set_xlabel("tokens of context")
    return _finished(figure, axes, found)


def _errors(axes: Any, i: int, name: str, xs: Sequence[float], values: Sequence[Any]) -> None:
    from matplotlib import colormaps

    style = {"marker": _MARKERS[i % 4], "color": colormaps["tab20"](i % 20), "capsize": 2}
    axes.errorbar(xs, [v.mean for v in values], [v.error for v in values], label=name, **style)


def _diverging(found: Results) -> list[str]:
    return [name for name, (value, _) in found.ranks.items() if value.mean > _LEAST]


def _finished(figure: Any, axes: Any, found: Results) -> Any:
    axes.set(yscale="log", ylabel="divergence, nats per token")
    equal = [name for name in found.ranks if name not in _diverging(found)]
    title = f"as the plain model:\n{', '.join(equal)}" if equal else None
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend(title=title, fontsize=7, title_fontsize=7, **place)
    return figure


def _needle(found: Results) -> Any:
    """The share of needles found, and the probability of the right answer, by length and depth."""
    mean = found.answered
    names = [n for n in found.order if not math.isnan(mean(n, "needle", "right").mean)]
    if not names:
        return None
    lengths, depths = found.settings.lengths or (), found.settings.depths
    rows = math.ceil(len(names) / _COLUMNS)
    figure, grid = _figure(rows, _COLUMNS, 2.4 * _COLUMNS, 0.8 + 2 * rows)
    for axes, name in zip(grid.flat, names, strict=False):
        cells = [[math.exp(mean(name, "needle", "logprob", n, d).mean) for n in lengths]
                 for d in depths]  # fmt: skip
        image = axes.imshow(cells, vmin=0, vmax=1, aspect="auto")
        for y, depth in enumerate(depths):
            for x, length in enumerate(lengths):
                share = mean(name, "needle", "right", length, depth).mean
                colour = "black" if cells[y][x] > 0.6 else "white"
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_title(name, fontsize=8)
        axes.set_xticks(range(len(lengths)), map(str, lengths), fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=grid).set_label("probability of a token of the answer", fontsize=8)
    figure.suptitle(f"Needle: share of {found.settings.seeds} documents answered", fontsize=10)
    return figure
