"""Tables of an evaluation, for a terminal and as Markdown, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from kvpass.errors import OptionError
from kvpass.evaluate.results import Results
from kvpass.evaluate.runner import PLAIN, Evaluation
from kvpass.machine import machine
from kvpass.report import Section, check_outputs, write_text

_ERRORS = "±: a standard error over texts; ?: there is only one"


def sections(evaluation: Evaluation) -> list[Section]:
    """All tables: the ranking, three by depth, and two of tasks."""
    found = Results(evaluation)
    tables = [
        _ranking(found, evaluation.notes),
        _by_depth(found, "Divergence by depth, 0.001 nats per token", _divergence),
        _by_depth(found, "Perplexity by depth, and its change against plain", perplexity_cell),
        _by_depth(found, "The plain model's most likely token, % of positions", _same),
    ]
    if found.settings.tasks:
        note = (
            "means over {} documents or more a task; *: more than two standard errors from plain, "
            "paired; rows are in the order of their divergence"
        )
        tables.append(_of_tasks(found, "Questions answered, all tokens right", _right, note))
        title = "Log-probability of the right answer, nats per token"
        note = "plain: itself; others: change against plain, paired by document, ± standard error"
        tables.append(_of_tasks(found, title, _logprob, note))
    return tables


def write_report(evaluation: Evaluation, folder: str, plots: bool = True) -> list[str]:
    """Writes ``report.md``, ``report.json`` and, with ``plots``, ``pareto.png``, ``depth.png`` and
    ``needle.png`` to a folder, which is made if need be; returns their paths.

    Raises:
        OptionError: if it cannot be written, or matplotlib is missing.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"'{folder}' cannot be made: {error.strerror}.") from None
    markdown, data = (str(Path(folder) / name) for name in ("report.md", "report.json"))
    check_outputs(data, str(Path(folder) / "pareto.png") if plots else None)
    drawn: list[str] = []
    if plots:
        from kvpass.evaluate.plots import draw

        drawn = draw(Results(evaluation), folder)
    tables = sections(evaluation)
    pictures = [f"![{Path(path).stem}]({Path(path).name})" for path in drawn]
    write_text(markdown, "\n\n".join([*(t.markdown() for t in tables), *pictures]) + "\n")
    content = {"machine": machine(), **asdict(evaluation), "tables": list(map(asdict, tables))}
    write_text(data, json.dumps(content, indent=1) + "\n")
    return [markdown, data, *drawn]


def _ranking(found: Results, notes: tuple[str, ...]) -> Section:
    header = ["", "bits", "KiB", "divergence", "behind the one above", "perplexity", "same token"]
    rows, lengths = [], set()
    for name in found.order:
        cells = [name, "-", "-"]
        if size := found.size(name):
            cells[1:] = [f"{size['bits']:.2f}", f"{size['bytes'] / 1024:,.0f}"]
            lengths.add(f"{size['cached']:,}")
        if name in found.quality:
            _, behind = found.ranks.get(name, (None, None))
            apart = f"{1000 * behind:.2f}{'' if behind.certain else ' tie'}" if behind else ""
            cells += [
                _divergence(found, name),
                apart,
                perplexity_cell(found, name),
                _same(found, name),
            ]
        else:
            cells.append(found.reasons.get(name, "not measured"))
        rows.append(cells)
    tokens = " or ".join(sorted(lengths))
    sizes = f"KiB and bits per element: all that a sequence by itself holds after {tokens} tokens"
    tie = f"{_ERRORS}; tie: within two of them, noise alone could put the row above the other"
    title = "Recipes by divergence from the plain model, 0.001 nats per token"
    return Section(title, header, rows, [tie, f"{sizes}, exact ones included", *notes])


def _by_depth(found: Results, title: str, cell: Callable[..., str]) -> Section:
    edges = found.settings.edges
    header = ["", *(f"{a}-{b}" for a, b in pairwise(edges)), "all"]
    buckets = [*range(len(edges) - 1), None]
    names = [name for name in found.order if name in found.quality]
    rows = [[name, *(cell(found, name, bucket) for bucket in buckets)] for name in names]
    return Section(title, header, rows, [f"columns: tokens of context; {_ERRORS}"])


def _of_tasks(
    found: Results, title: str, cell: Callable[[Results, str, str], str], note: str
) -> Section:
    tasks = found.settings.tasks
    rows = [[name, *(cell(found, name, task) for task in tasks)] for name in found.order]
    documents = found.settings.seeds * len(found.settings.lengths or ())
    return Section(title, ["", *tasks], rows, [note.format(documents)])


def _divergence(found: Results, name: str, bucket: int | None = None) -> str:
    return "0" if name == PLAIN else f"{1000 * found.mean(name, 'kl', bucket):z.2f}"


def perplexity_cell(found: Results, name: str, bucket: int | None = None) -> str:
    """A recipe's perplexity, and its change against that of the plain model."""
    perplexity = f"{math.exp(found.mean(name, 'nll', bucket).mean):.2f}"
    if name == PLAIN:
        return perplexity
    return f"{perplexity} {found.mean(name, 'nll', bucket, PLAIN).percent:+z.2f}%"


def _same(found: Results, name: str, bucket: int | None = None) -> str:
    return "100" if name == PLAIN else f"{100 * found.mean(name, 'same', bucket):.1f}"


def _right(found: Results, name: str, task: str) -> str:
    share = found.answered(name, task, "right").mean
    certain = name != PLAIN and found.answered(name, task, "right", against=PLAIN).certain
    return "-" if math.isnan(share) else f"{share:.0%}{'*' * certain}"


def _logprob(found: Results, name: str, task: str) -> str:
    if name == PLAIN:
        return f"{found.answered(name, task, 'logprob').mean:.2f}"
    change = found.answered(name, task, "logprob", against=PLAIN)
    return "-" if math.isnan(change.mean) else f"{change:+z.2f}"
