"""``kvpass bench attention``: one decode step's attention, packed against dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvpass.bench.contenders import (
    FLEX_NAME,
    HF_NAME,
    ROWS_NAME,
    Case,
    dense_contenders,
    packed_contender,
)
from kvpass.bench.plans import check_recipe
from kvpass.bench.report import Column, result_json, speed_ups, timing_section
from kvpass.bench.timing import Result, copy_bandwidth, made_or_failing, measure
from kvpass.format.dtypes import dtype_name
from kvpass.machine import require_memory
from kvpass.report import Section, number

PEERS = (HF_NAME, ROWS_NAME, FLEX_NAME)


@dataclass(frozen=True)
class AttentionRun:
    """The results of one `Case`, and the GB/s that a plain copy reaches."""

    case: Case
    results: list[Result]
    copy_gb_s: float


@torch.no_grad()
def bench_attention(
    cases: Sequence[Case],
    recipes: Sequence[str],
    rounds: int = 30,
    *,
    graphs: bool = True,
    go_on: bool = False,
) -> list[AttentionRun]:
    """Times ``kvpass::attention``, by the best provider for the device, against dense attention.

    Args:
        cases: shapes of the step.
        recipes: their names.
        rounds: timed calls of every contender.
        graphs: on a GPU, time CUDA graphs (kernels without launches).
        go_on: a recipe that fails becomes a result with a ``problem``.

    Raises:
        OptionError: if a recipe is not known, or memory does not suffice.
        PlanError: if a recipe does not fit the head dimension.
    """
    for case in cases:
        for name in recipes:
            check_recipe(name, case.head_dim)
        require_memory(case.needed_bytes, case.device, f"A cache of {case.tokens} tokens")
    runs = []
    for case in cases:
        # Dynamo keeps eight graphs of a function; each case compiles flex_attention anew.
        torch.compiler.reset()
        q, k, v = case.query(0), case.cached(1), case.cached(2)
        contenders = [
            made_or_failing(f"kvpass {n}", partial(packed_contender, case, n, q, k, v), go_on)
            for n in recipes
        ]
        contenders += dense_contenders(case, q, k, v)
        results = measure(contenders, rounds, case.device, graphs=graphs)
        # Their buffers are freed before the next case.
        del contenders, q, k, v
        runs.append(AttentionRun(case, results, copy_bandwidth(case.device)))
    return runs


def attention_section(run: AttentionRun) -> Section:
    """The table of one case. Speed-ups are medians of a peer over medians of the row."""

    def rate(result: Result) -> float:
        return result.bytes_read / result.median_ms / 1e6

    case = run.case
    columns: list[Column] = [
        *speed_ups(run.results, PEERS),
        ("MiB read", lambda r: f"{r.bytes_read / 2**20:.1f}"),
        ("GB/s", lambda r: number(rate(r))),
        ("of copy", lambda r: f"{rate(r) / run.copy_gb_s:.0%}"),
    ]
    new = "" if case.queries == 1 else f", of which {case.queries} are new"
    title = (
        f"{case.tokens} tokens{new}, batch {case.batch}, {case.heads} query and {case.kv_heads} KV "
        f"heads of {case.head_dim}, {dtype_name(case.dtype)} on {case.device}; "
        f"a copy moves {number(run.copy_gb_s)} GB/s"
    )
    return timing_section(title, ("attention", "ms"), run.results, columns)


def attention_json(run: AttentionRun) -> list[dict[str, Any]]:
    """A row for each result, raw times included."""
    case = {name: getattr(run.case, name) for name in ("tokens", "queries", "batch")}
    return [case | {"copy_gb_s": run.copy_gb_s} | result_json(result) for result in run.results]
