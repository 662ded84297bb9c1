"""Tables and JSON of what was timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from kvpass.bench.timing import Result
from kvpass.report import Section, number

# The header of a column, and what stands in it for a result that was timed.
Column = tuple[str, Callable[[Result], str]]


def timing_section(
    title: str, names: Sequence[str], results: Sequence[Result], columns: Sequence[Column]
) -> Section:
    """A row per result; ``names`` are the headers of the contenders and of their medians."""
    header = [*names, "p25-p75", *(name for name, _ in columns), "error"]
    rows = []
    for result in results:
        cells = timing_cells(result)
        if result.times_ms:
            cells += [*(cell(result) for _, cell in columns), f"{result.error:.1e}"]
        rows.append(cells)
    return Section(title, header, rows, [f"{r.name}: {r.note}" for r in results if r.note])


def timing_cells(result: Result) -> list[str]:
    """Name, median and quartiles in milliseconds; or the name and why there is no time."""
    if result.wrong:
        problem = f"relative error {result.error:.2e}, allowed {result.tolerance:.0e}"
        return [result.name, f"WRONG: {problem}"]
    if not result.times_ms:
        return [result.name, f"not run: {result.problem}"]
    spread = "-".join(map(number, result.spread_ms))
    return [result.name, number(result.median_ms), spread]


def speed_ups(results: Sequence[Result], names: Iterable[str]) -> list[Column]:
    """Medians of a peer over medians of the row: of the peers with these names that were timed,
    and of the fastest of all peers."""
    peers = [r for r in results if r.times_ms and not r.name.startswith("kvpass ")]
    best = min(peers, key=lambda r: r.median_ms, default=None)
    shown = [r for r in peers if r.name in names]
    if best is not None and best not in shown:
        shown.append(best)
    return [(f"x {peer.name}", partial(_speed_up, peer)) for peer in shown]


def _speed_up(peer: Result, result: Result) -> str:
    return f"{peer.median_ms / result.median_ms:.2f}"


def result_json(result: Result) -> dict[str, Any]:
    """All that was measured of one contender, raw times included."""
    status = "wrong" if result.wrong else "timed" if result.times_ms else "not run"
    return {"status": status, **asdict(result)}
