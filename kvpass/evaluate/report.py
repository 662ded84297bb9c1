"""Tables of an evaluation, for a terminal and as Markdown, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from kvpass.bench.device import machine
from kvpass.bench.report import Section, check_outputs, write_text
from kvpass.evaluate.estimates import Estimate
from kvpass.evaluate.results import Results
from kvpass.evaluate.runner import PLAIN, Evaluation

_ERRORS = "±: a standard error over texts"


def sections(evaluation: Evaluation) -> list[Section]:
    """All tables: the ranking, three by depth, and two of tasks."""
    found = Results(evaluation)
    tables = [_ranking(found, evaluation.notes)]
    if found.quality:
        tables += [
            _by_depth(found, "Divergence by depth, 0.001 nats per token", _divergence),
            _by_depth(found, "Perplexity by depth", _perplexity, "; changes are against plain"),
            _by_depth(found, "The plain model's most likely token, % of positions", _same),
        ]
    if found.settings.tasks:
        tables += [_right(found), _logprob(found)]
    return tables


def write_report(evaluation: Evaluation, folder: str, plots: bool = True) -> list[str]:
    """Writes ``report.md``, ``report.json`` and, with ``plots``, ``pareto.png``, ``depth.png`` and
    ``needle.png`` to a folder, which is made if need be; returns their paths.

    Raises:
        OptionError: if it cannot be written, or matplotlib is missing.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = {name: str(Path(folder) / name) for name in ("report.md", "report.json")}
    # Before the rest: it says whether matplotlib is missing.
    check_outputs(None, str(Path(folder) / "pareto.png") if plots else None)
    tables = sections(evaluation)
    content = {
        "machine": machine(),
        "settings": asdict(evaluation.settings),
        "notes": evaluation.notes,
        "tables": [asdict(table) for table in tables],
        "records": evaluation.records,
    }
    drawn = []
    if plots:
        from kvpass.evaluate.plots import draw

        drawn = draw(Results(evaluation), folder)
    pictures = [f"![{Path(path).stem}]({Path(path).name})" for path in drawn]
    write_text(paths["report.md"], "\n\n".join([*(t.markdown() for t in tables), *pictures]) + "\n")
    write_text(paths["report.json"], json.dumps(content, indent=1) + "\n")
    return [*paths.values(), *drawn]


def _ranking(found: Results, notes: tuple[str, ...]) -> Section:
    header = ["", "bits", "KiB", "divergence", "behind the one above", "perplexity", "same token"]
    behind = {rank.name: rank for rank in found.ranks}
    rows = []
    for name in found.order:
        size = found.size(name)
        cells = [name, *((f"{size[1]:.2f}", f"{size[0] / 1024:,.0f}") if size else ("-", "-"))]
        if name in found.quality:
            rank = behind.get(name)
            apart = "" if rank is None or rank.behind is None else _milli(rank.behind)
            cells += [_divergence(found, name), f"{apart} tie" if rank and rank.tie else apart,
                      _perplexity(found, name), _same(found, name)]  # fmt: skip
        else:
            why = found.problems.get(name) or found.skipped.get(name, "not measured")
            cells.append(f"failed: {why}" if name in found.problems else why)
        rows.append(cells)
    tokens = {f"{size[2]:,}" for name in found.order if (size := found.size(name))}
    return Section(
        "Recipes by divergence from the plain model, 0.001 nats per token",
        header,
        rows,
        [
            f"{_ERRORS}; tie: within two of them, noise alone could put the row above the other",
            "bits per element and KiB of a sequence: all that its cache holds after "
            f"{' or '.join(sorted(tokens))} tokens, exact ones included",
            *notes,
        ],
    )


def _by_depth(found: Results, title: str, cell: Callable[..., str], more: str = "") -> Section:
    edges = found.settings.edges
    header = ["", *(f"{a}-{b}" for a, b in pairwise(edges)), "all"]
    buckets = [*range(len(edges) - 1), None]
    rows = [
        [name, *(cell(found, name, bucket) for bucket in buckets)]
        for name in found.order
        if name in found.quality
    ]
    return Section(title, header, rows, [f"columns: tokens of context; {_ERRORS}{more}"])


def _right(found: Results) -> Section:
    """Shares of right answers; a change that is no tie is marked."""

    def cell(name: str, task: str) -> str:
        answers = found.answered(name, task).values()
        if not answers:
            return "-"
        share = f"{sum(a.right for a in answers) / len(answers):.0%}"
        change, _ = found.answers_change(name, task)
        return share + ("*" if name != PLAIN and change.certain else "")

    tasks = found.settings.tasks
    counts = {len(found.answered(PLAIN, task)) for task in tasks}
    note = f"{min(counts)} to {max(counts)} documents a task; not marked *: a tie with plain"
    return _of_tasks(found, "Questions answered, all tokens right", cell, note)


def _logprob(found: Results) -> Section:
    """Changes of log-probabilities of the right answer."""

    def cell(name: str, task: str) -> str:
        answers = found.answered(name, task).values()
        if not answers:
            return "-"
        if name == PLAIN:
            return f"{sum(a.logprob for a in answers) / len(answers):.2f}"
        _, change = found.answers_change(name, task)
        return f"{change.mean:+.2f}±{change.error:.2f}"

    note = "plain: itself; others: change against plain, paired by document, ± a standard error"
    return _of_tasks(found, "Log-probability of the right answer, nats per token", cell, note)


def _of_tasks(found: Results, title: str, cell: Callable[[str, str], str], note: str) -> Section:
    tasks = found.settings.tasks
    rows = [[name, *(cell(name, task) for task in tasks)] for name in found.order]
    return Section(title, ["", *tasks], rows, [note])


def _divergence(found: Results, name: str, bucket: int | None = None) -> str:
    return "0" if name == PLAIN else _milli(found.mean(name, "kl", bucket))


def _perplexity(found: Results, name: str, bucket: int | None = None) -> str:
    perplexity = f"{math.exp(found.mean(name, 'nll', bucket).mean):.2f}"
    if name == PLAIN:
        return perplexity
    # Of a small change of the logarithm, the error is that of the ratio.
    change = found.change(name, "nll", bucket)
    return f"{perplexity} {100 * math.expm1(change.mean):+.1f} ±{100 * change.error:.1f}%"


def _same(found: Results, name: str, bucket: int | None = None) -> str:
    share = found.mean(name, "same", bucket)
    return "100" if name == PLAIN else f"{100 * share.mean:.1f} ±{100 * share.error:.1f}"


def _milli(x: Estimate) -> str:
    return f"{1000 * x.mean:.2f} ±{1000 * x.error:.2f}"
