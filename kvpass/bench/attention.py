"""``kvpass bench attention``: one decode step's attention, packed against dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvpass.bench.contenders import (
    FLEX_NAME,
    HF_NAME,
    ROWS_NAME,
    Case,
    dense_contenders,
    packed_contender,
)
from kvpass.bench.device import require_memory
from kvpass.bench.plans import check_recipe
from kvpass.bench.report import Section, number, timing_cells
from kvpass.bench.timing import Result, copy_bandwidth, made_or_failing, measure


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
    progress: bool = True,
    go_on: bool = False,
) -> list[AttentionRun]:
    """Times ``kvpass::attention``, by the best provider for the device, against dense attention.

    Args:
        cases: shapes of the decode step.
        recipes: names of recipes.
        rounds: timed calls of every contender.
        graphs: on a GPU, time CUDA graphs (kernels without launches).
        progress: show a bar.
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
        results = measure(contenders, rounds, case.device, graphs=graphs, progress=progress)
        del contenders, q, k, v
        runs.append(AttentionRun(case, results, copy_bandwidth(case.device)))
    return runs


def attention_section(run: AttentionRun) -> Section:
    """The table of one case. Speed-ups are medians of a peer over medians of the row."""
    case, peers = run.case, speed_up_peers(run.results)
    header = ["attention", "ms", "p25-p75", *(f"x {p.name}" for p in peers)]
    header += ["MiB read", "GB/s", "of copy", "error"]
    rows = []
    for result in run.results:
        cells = timing_cells(result)
        if result.times_ms:
            rate = result.bytes_read / result.median_ms / 1e6
            cells += [f"{p.median_ms / result.median_ms:.2f}" for p in peers]
            cells += [f"{result.bytes_read / 2**20:.1f}", number(rate)]
            cells += [f"{rate / run.copy_gb_s:.0%}", f"{result.error:.1e}"]
        rows.append(cells)
    title = (
        f"{case.tokens} tokens, batch {case.batch}, {case.heads} query and {case.kv_heads} KV "
        f"heads of {case.head_dim}, {str(case.dtype).removeprefix('torch.')} on {case.device}; "
        f"a copy moves {number(run.copy_gb_s)} GB/s"
    )
    notes = [f"{r.name}: {r.note}" for r in run.results if r.note]
    return Section(title, header, rows, notes)


def speed_up_peers(results: Sequence[Result]) -> list[Result]:
    """SDPA in its two forms, flex_attention, and the fastest dense attention of all."""
    dense = [r for r in results if r.times_ms and not r.name.startswith("kvpass ")]
    peers = [r for r in dense if r.name in (HF_NAME, ROWS_NAME, FLEX_NAME)]
    best = min(dense, key=lambda r: r.median_ms, default=None)
    return peers if best is None or best in peers else [*peers, best]
