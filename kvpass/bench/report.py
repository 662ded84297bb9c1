"""Tables, JSON files and plots of what was measured."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpass.bench.device import machine
from kvpass.bench.timing import Result
from kvpass.errors import OptionError


@dataclass(frozen=True)
class Section:
    """A table with a title and footnotes. Rows may be shorter than the header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def __str__(self) -> str:
        table = [self.header, *self.rows]
        # A row that ends early ends in a sentence, which may be wider than its column.
        measured = [r if len(r) == len(self.header) else r[:-1] for r in table]
        widths = [max(len(r[i]) for r in measured if len(r) > i) for i in range(len(self.header))]
        lines = [self.title]
        for row in table:
            cells = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=False)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def number(x: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 3
    return f"{x:.{digits}f}"


def timing_cells(result: Result) -> list[str]:
    """Name, median and quartiles in milliseconds; or the name and why there is no time."""
    if result.wrong:
        return [
            result.name,
            f"WRONG: relative error {result.error:.2e}, allowed {result.tolerance:.0e}",
        ]
    if not result.times_ms:
        return [result.name, f"not run: {result.problem}"]
    low, high = result.spread_ms
    return [result.name, number(result.median_ms), f"{number(low)}-{number(high)}"]


def result_json(result: Result) -> dict[str, Any]:
    """All that was measured of one contender, raw times included."""
    status = "wrong" if result.wrong else "timed" if result.times_ms else "not run"
    return {"status": status, **asdict(result)}


def write_json(
    path: str, command: str, arguments: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the machine, the versions, the arguments and all results.

    Raises:
        OptionError: if the file cannot be written.
    """
    content = {
        "command": command,
        "arguments": dict(arguments),
        "machine": machine(),
        "results": list(results),
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")
    except OSError as error:
        raise OptionError(f"'{path}' cannot be written: {error.strerror}.") from error


def check_outputs(json_path: str | None, plot_path: str | None) -> None:
    """Says before anything is measured that it could not be written.

    Raises:
        OptionError: if a folder is missing, or matplotlib is.
    """
    for path in filter(None, (json_path, plot_path)):
        if not Path(path).absolute().parent.is_dir():
            raise OptionError(f"'{path}' cannot be written: its folder does not exist.")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'kvpass[plot]'.")


def plot_lines(
    path: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> None:
    """One line per series of points, both axes logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in series.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def plot_bars(path: str, bars: Mapping[str, float], x_label: str) -> None:
    """One horizontal bar per name, the first on top."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.45 * max(len(bars), 1)))
    drawn = axes.barh(list(bars), list(bars.values()))
    axes.bar_label(drawn, fmt="%.4g")
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
