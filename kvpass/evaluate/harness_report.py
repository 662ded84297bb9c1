"""The table of tasks of lm-evaluation-harness, and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvpass.errors import is_number
from kvpass.evaluate.estimates import Estimate, estimate
from kvpass.evaluate.runner import PLAIN
from kvpass.evaluate.store import Record
from kvpass.machine import machine
from kvpass.report import Section, write_text

# What RULER writes for a document of another length than the metric's.
_NOT_MEASURED = -1
_NOTES = (
    "plain: ± the harness's standard error; others: change against plain, paired by document where "
    "a metric is a mean or a perplexity of documents (there in %), ± standard error",
    "tie: within two of them, noise alone could be the change; ?: no standard error is known",
)


def harness_section(records: Sequence[Record]) -> Section:
    """A row for each metric of each task, a column for each recipe: see `run_tasks`."""
    plain = next(r for r in records if r["recipe"] == PLAIN)
    measured = [r for r in records if "results" in r]
    rows = [
        [_task_name(plain, task), metric, _documents(plain, task, *metric.split(","))]
        + [_cell(record, plain, task, *metric.split(",")) for record in measured]
        for task, found in plain["results"].items()
        for metric in found
        if _is_metric(metric, found)
    ]
    bits = [f"{record['bits']:.2f}" for record in measured]
    rows.append(["cache", "bits per element", "", *bits])
    names = [record["recipe"] for record in measured]
    notes = [
        *_NOTES,
        f"cache: all that is held behind the longest text, {plain['cached']:,} tokens",
    ]
    if plain["shortened"]:
        notes.append(f"{plain['shortened']} requests were too long, and lost their beginning")
    notes += [f"{r['recipe']}: {r['skipped']}" for r in records if "skipped" in r]
    notes += [f"{r['recipe']}: failed: {r['problem']}" for r in records if "problem" in r]
    title = "Tasks of lm-evaluation-harness, read through the cache"
    return Section(title, ["task", "metric", "documents", *names], rows, notes)


def write_harness_report(records: Sequence[Record], folder: str) -> list[str]:
    """Writes ``lm_eval.md`` and ``lm_eval.json`` to a folder; returns their paths.

    Raises:
        OptionError: if they cannot be written.
    """
    section = harness_section(records)
    markdown, data = (str(Path(folder) / f"lm_eval.{end}") for end in ("md", "json"))
    write_text(markdown, section.markdown() + "\n")
    short = [{k: v for k, v in record.items() if k != "samples"} for record in records]
    content = {"machine": machine(), "records": short, "table": asdict(section)}
    write_text(data, json.dumps(content, indent=1) + "\n")
    return [markdown, data]


def _is_metric(name: str, found: Record) -> bool:
    """Whether ``acc,none`` is a metric that was measured; it stands beside its error and names."""
    metric, comma, _ = name.partition(",")
    value = found[name]
    numeric = is_number(value) and value != _NOT_MEASURED
    return bool(comma) and not metric.endswith("_stderr") and numeric


def _task_name(record: Record, task: str) -> str:
    shots = record["n-shot"].get(task) or 0
    return f"{task}, {shots}-shot" if is_number(shots) and shots else task


def _documents(record: Record, task: str, metric: str, filter_: str) -> str:
    """How many have a number for the metric, or were asked; a group has none of its own."""
    asked = record["n-samples"].get(task, {"effective": ""})["effective"]
    return str(len(_by_document(record, task, metric, filter_)) or asked)


def _cell(record: Record, plain: Record, task: str, metric: str, filter_: str) -> str:
    value = _reported(record, task, metric, filter_)
    if record is plain:
        return f"{value:.4f}"
    change = _change(record, plain, task, metric, filter_)
    return f"{value.mean:.4f} {change}"


def _reported(record: Record, task: str, metric: str, filter_: str) -> Estimate:
    """What the harness says, with its standard error."""
    found = record["results"][task]
    error = found.get(f"{metric}_stderr,{filter_}")
    return Estimate(found[f"{metric},{filter_}"], error if is_number(error) else math.nan)


def _change(record: Record, plain: Record, task: str, metric: str, filter_: str) -> str:
    own, other = (_reported(r, task, metric, filter_) for r in (record, plain))
    found, expected = (_by_document(r, task, metric, filter_) for r in (record, plain))
    if _prompts(record, task) != _prompts(plain, task):
        # Drawn anew each time: no document has a partner.
        found = {}
    keys = found.keys() & expected.keys()
    totals = torch.tensor([found[k][0] - expected[k][0] for k in keys])
    weights = torch.tensor([expected[k][1] for k in keys])
    apart, less = estimate(totals, weights), estimate(-totals, weights)
    unit, spec = "", "+z.4f"
    if not _agrees(apart.mean, own.mean - other.mean):
        if min(own.mean, other.mean) > 0 and _agrees(less.mean, math.log(own.mean / other.mean)):
            # A perplexity.
            apart, unit, spec = less.percent, "%", "+z.2f"
        else:
            apart = Estimate(own.mean - other.mean, math.hypot(own.error, other.error))
    known = not math.isnan(apart.error)
    return f"{apart:{spec}}{unit}{' tie' if known and not apart.certain else ''}"


def _agrees(a: float, b: float) -> bool:
    """Whether documents say what the metric says."""
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _by_document(
    record: Record, task: str, metric: str, filter_: str
) -> dict[int, tuple[float, float]]:
    """For each document by its number, what it adds to the metric, and its weight."""
    samples = record["samples"].get(task, ())
    own = {s["doc_id"]: s.get(metric) for s in samples if s["filter"] == filter_}
    pairs: dict[int, Any] = {k: v if isinstance(v, list) else [v, 1] for k, v in own.items()}
    return {
        k: (float(v[0]), float(v[1]))
        for k, v in pairs.items()
        if len(v) == 2 and all(map(_counts, v)) and v[0] != _NOT_MEASURED
    }


def _counts(value: object) -> bool:
    return is_number(value) or isinstance(value, bool)


def _prompts(record: Record, task: str) -> list[str]:
    return [sample["prompt_hash"] for sample in record["samples"].get(task, ())]
