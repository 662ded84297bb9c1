"""The zoo's outcomes as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpass.bench.report import Section
from kvpass.errors import OptionError
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
    counts = {"wholly packed": 0, "packed in part": 0, "not packed": 0, "failed": 0}
    for own in _by_family(outcomes).values():
        checked = [o for o in own if o.tensors]
        if any(o.failed for o in own):
            counts["failed"] += 1
        elif checked and all(o.packed == o.tensors for o in checked):
            counts["wholly packed"] += 1
        elif any(o.packed for o in checked):
            counts["packed in part"] += 1
        else:
            counts["not packed"] += 1
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{len(_by_family(outcomes))} families: {listed}"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same as a Markdown table with a list of notes."""
    section = zoo_section(outcomes)
    table = [section.header, ["---"] * len(section.header), *section.rows]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    notes = [f"- {note}" for note in section.notes]
    return "\n".join([section.title, "", *lines, "", *notes]) + "\n"


def write_markdown(path: str, outcomes: Sequence[Outcome]) -> None:
    """Writes `markdown`.

    Raises:
        OptionError: if the file cannot be written.
    """
    try:
        Path(path).write_text(markdown(outcomes))
    except OSError as error:
        raise OptionError(f"'{path}' cannot be written: {error.strerror}.") from error


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """All that is known of one outcome."""
    return {**asdict(outcome), "mode": str(outcome.mode), **asdict(outcome.mode)}


def refusals(outcomes: Sequence[Outcome]) -> Mapping[str, list[str]]:
    """Families by the reason for which something of theirs was refused, the commonest first."""
    found: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for why in outcome.refused:
            found.setdefault(why, {})[outcome.family] = None
    return {why: list(found[why]) for why in sorted(found, key=lambda w: (-len(found[w]), w))}


def _by_family(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.family, []).append(outcome)
    return found


def _cell(own: Sequence[Outcome]) -> str:
    """About the worst of the recipes."""
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
    failed = [f"{o.family} {o.mode} {o.recipe}: {o.status}: {o.problem}"
              for o in outcomes if o.failed]  # fmt: skip
    refused = [
        f"refused in {len(families)} ({', '.join(families)}): {why}"
        for why, families in refusals(outcomes).items()
    ]
    # An update that is not even refused was not recognised as one.
    unseen = dict.fromkeys(
        o.family for o in outcomes if o.status == "ok" and o.packed < o.tensors and not o.refused
    )
    unknown = [f"cache updates not recognised in {len(unseen)}: {', '.join(unseen)}"]
    without = {(o.family, o.status, o.problem) for o in outcomes if o.status.endswith(" fails")}
    plain = [f"{family}: {status}: {problem}" for family, status, problem in sorted(without)]
    return [*failed, *refused, *(unknown if unseen else []), *plain]
