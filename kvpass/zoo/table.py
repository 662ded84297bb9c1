"""The zoo's outcomes as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any

from kvpass.report import Section
from kvpass.zoo.outcome import Outcome

# Worst first. A cell of the table is about the worst of its recipes.
_STATUSES = ("crash", "wrong", "timeout", "unchecked", "compile fails", "plain fails",
             "no such attention", "ok")  # fmt: skip
LEGEND = (
    "cells: packed keys and values / all of them in the cache; +n: n of the packed ones are "
    "decoded in front of their attention; graphs: the most that Dynamo compiled; error: the "
    "largest, relative to the largest logit"
)


def zoo_section(outcomes: Sequence[Outcome]) -> Section:
    """A row per family and a column per mode, then what was refused or went wrong."""
    modes = list(dict.fromkeys(o.mode for o in outcomes))
    rows = []
    for family, own in _by_family(outcomes).items():
        cells = [_cell([o for o in own if o.mode == mode]) for mode in modes]
        error = max(o.error for o in own)
        rows.append([family, *cells, str(max(o.graphs for o in own)), f"{error:.0e}"])
    header = ["family", *map(str, modes), "graphs", "error"]
    return Section(summary(outcomes), header, rows, [LEGEND, *_notes(outcomes)])


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: how many families are packed wholly, in part, or not at all."""
    families = _by_family(outcomes)
    counts = Counter(_packed(own) for own in families.values())
    kinds = ("wholly packed", "packed in part", "not packed", "failed")
    return f"{len(families)} families: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def _packed(own: Sequence[Outcome]) -> str:
    checked = [o for o in own if o.tensors]
    if any(o.failed for o in own):
        return "failed"
    if checked and all(o.packed == o.tensors for o in checked):
        return "wholly packed"
    return "packed in part" if any(o.packed for o in checked) else "not packed"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same as a Markdown table with a list of notes."""
    return zoo_section(outcomes).markdown() + "\n"


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """All that is known of one outcome."""
    return {**asdict(outcome), "mode": str(outcome.mode), **asdict(outcome.mode)}


def _by_family(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes by family; `kvpass.zoo.pool.run_families` gives those of one without a gap."""
    return {name: list(own) for name, own in groupby(outcomes, key=attrgetter("family"))}


def _cell(own: Sequence[Outcome]) -> str:
    if not own:
        return "-"
    worst = min(own, key=lambda o: (_STATUSES.index(o.status), o.packed))
    if worst.failed:
        return worst.status.upper()
    if worst.status not in ("ok", "unchecked"):
        return {"no such attention": "-"}.get(worst.status, worst.status)
    cell = f"{worst.packed}/{worst.tensors}" + (f" +{worst.decoded}" if worst.decoded else "")
    return cell if worst.status == "ok" else f"{cell} unchecked"


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = [f"{o.family} {o.mode} {o.recipe}: {o.status}: {o.problem}"
             for o in outcomes if o.failed]  # fmt: skip
    refused: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for why in outcome.refused:
            refused.setdefault(why, {})[outcome.family] = None
    for why, families in sorted(refused.items(), key=lambda item: (-len(item[1]), item[0])):
        notes.append(f"refused in {len(families)} ({', '.join(families)}): {why}")
    # An update that is not even refused was not recognised as one.
    unseen = dict.fromkeys(
        o.family for o in outcomes if o.status == "ok" and o.packed < o.tensors and not o.refused
    )
    if unseen:
        notes.append(f"cache updates not recognised in {len(unseen)}: {', '.join(unseen)}")
    without = {(o.family, o.status, o.problem) for o in outcomes if o.status.endswith(" fails")}
    return notes + [": ".join(parts) for parts in sorted(without)]
