"""Tables, JSON files and plots of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpass.errors import OptionError, check_installed
from kvpass.machine import machine


@dataclass(frozen=True)
class Section:
    """A table with a title and footnotes. Rows may be shorter than the header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

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

    def markdown(self) -> str:
        """The same as a Markdown table with a list of notes."""
        table = [self.header, ["---"] * len(self.header), *self.rows]
        lines = ["| " + " | ".join(row) + " |" for row in table]
        return "\n".join([self.title, "", *lines, "", *(f"- {note}" for note in self.notes)])


def number(x: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if x >= 100 else 1 if x >= 10 else 2 if x >= 1 else 3
    return f"{x:.{digits}f}"


def write_json(
    path: str | None,
    command: str,
    arguments: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
) -> None:
    """Writes the machine, the versions, the arguments and all results, as `write_text` does."""
    content = {"command": command, "arguments": arguments, "machine": machine(), "results": results}
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")


def write_text(path: str | None, text: str) -> None:
    """Writes a file if there is a path.

    Raises:
        OptionError: if it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OptionError(f"'{path}' cannot be written: {error.strerror}.") from error


def check_outputs(json_path: str | None, plot: str | None = None) -> None:
    """Refuses, before anything is measured, outputs that could not be written.

    Raises:
        OptionError: if a folder is missing, or matplotlib is, which ``plot`` needs.
    """
    for path in filter(None, (json_path, plot)):
        if not Path(path).absolute().parent.is_dir():
            raise OptionError(f"'{path}' cannot be written: its folder does not exist.")
    if plot is not None:
        check_installed("--plot", "matplotlib", "matplotlib", extra="plot")


def plot_lines(
    path: str, series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> None:
    """One line per series of points, both axes logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="tight")
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel=x_label, ylabel=y_label)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def plot_bars(path: str, bars: Mapping[str, float], x_label: str) -> None:
    """One horizontal bar per name, the first on top."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.45 * max(len(bars), 1)), layout="tight")
    axes.bar_label(axes.barh(list(bars), list(bars.values())), fmt="%.4g")
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    figure.savefig(path)
    plt.close(figure)
