"""``kvpass bench gpu``: in one run, all that only a GPU can settle, the most important first."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from kvpass.bench.attention import attention_json, attention_section, bench_attention
from kvpass.bench.contenders import Case, packed_contender
from kvpass.bench.decode import bench_decode, decode_json, decode_section
from kvpass.bench.filling import Setting
from kvpass.bench.kernel_checks import Check, check_kernels, worst
from kvpass.bench.model_checks import FIRST, VARIANTS, ModelCase, check_model
from kvpass.bench.models import PRESETS
from kvpass.bench.timing import Result
from kvpass.errors import OptionError, unknown
from kvpass.inner import TUNE_VARIABLE, compile_ahead, tunings
from kvpass.machine import free_memory
from kvpass.report import write_json

_RECIPES = ("kivi-4bit", "kivi-2bit")
_CALIBRATED = ("kvquant-nuq3-1%", "kvquant-nuq2")
# Recipes whose kernels are checked; calibrated ones with random tokens, and SKVQ's without what
# comes from texts (its defaults: `kvpass.bench.model_checks`).
_FORMATS = ("fp", *_RECIPES, "skvq-k2v2,clip=0.9,reorder=false", *_CALIBRATED)
# Batch and tokens of the attention tables, for the heads of an 8B Llama.
_LONG = ((1, 32768), (1, 131072))
_CASES = ((1, 4096), (8, 8192), (8, 32768), (32, 8192))
_TUNED = ((1, 4096), (8, 32768))
# Model dtype and head dimension of the kernels that are checked one by one.
_CHECKED = ((torch.bfloat16, 128), (torch.float16, 128), (torch.float16, 64), (torch.float32, 128))
_DECODED_TOKENS = 32768
_DECODED_LAYERS = 8
_DECODE_BATCH = 4

Rows = list[dict[str, Any]]
# Text to print, rows for the file, and whether all is right.
Finding = tuple[str, Rows, bool]
PARTS = ("subnormals", "model", "long", "decode", "kernels", "variants", "attention", "sizes")
_TOO_LATE: Finding = ("not begun: the time is up", [], False)


def bench_gpu(
    device: torch.device, path: str, minutes: float = 8, parts: Sequence[str] = PARTS
) -> bool:
    """Checks subnormals and compiled models, measures long contexts and decoding, checks all
    kernels, then measures the rest, and writes ``path``, a JSON file, after each part.

    A part that fails is reported, and the next one is run: a GPU may be at hand only once. No part
    is begun after so many ``minutes``; ``parts`` are some of `PARTS`, always in their order.

    Returns:
        Whether every part ran and every result was right.

    Raises:
        OptionError: if ``device`` is no GPU, a part is not known, or the file cannot be written.
    """
    for name in parts:
        if name not in PARTS:
            raise OptionError(unknown("part", name, PARTS))
    if device.type != "cuda":
        raise OptionError(
            "'bench gpu' needs a CUDA GPU, but torch finds none here; --dry-run needs none."
        )
    deadline = time.monotonic() + 60 * minutes
    rows: Rows = []
    fine = True
    for name, part in _parts(device):
        if name.split()[0] not in parts:
            continue
        start = time.monotonic()
        text, found, right = _TOO_LATE if start > deadline else _attempt(part)
        seconds, verdict = time.monotonic() - start, "right" if right else "NOT RIGHT"
        print(f"== {name}, {seconds:.0f} s: {verdict}\n{text}", flush=True)
        rows += [{"part": name} | row for row in found]
        rows.append({"part": name, "right": right, "seconds": seconds, "text": text})
        fine = fine and right
        write_json(path, "gpu", {"minutes": minutes, "parts": list(parts)}, rows)
    return fine


def _parts(device: torch.device) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Names and parts in order; the first word of a name is one of `PARTS`."""
    yield "subnormals", partial(_subnormals, device)
    yield from ((f"model {case}", partial(_model, device, case)) for case in FIRST)
    for batch, tokens in _LONG:
        for launches in ("plain", "graph"):
            measured = partial(_attention, device, batch, tokens, launches)
            yield f"long B={batch} T={tokens} launches={launches}", measured
    yield "decode", partial(_decode, device)
    for dtype, dim in _CHECKED:
        yield f"kernels {dtype} D={dim}", partial(_kernels, device, dtype, dim)
    yield from ((f"variants {case}", partial(_model, device, case)) for case in VARIANTS)
    for batch, tokens in _CASES:
        yield f"attention B={batch} T={tokens}", partial(_attention, device, batch, tokens)
    yield "sizes", partial(_sizes, device)


def _attempt(part: Callable[[], Finding]) -> Finding:
    try:
        return part()
    except Exception:
        return traceback.format_exc(), [], False
    finally:
        torch.cuda.empty_cache()


def _subnormals(device: torch.device) -> Finding:
    """2-bit and 4-bit codes at every position that the kernels use, by one warp and by four."""
    from kvpass.bench.subnormals import subnormal_differences

    rows: Rows = [
        {"bits": bits, "position": at, "warps": warps}
        | {"differences": subnormal_differences(bits, at, device, warps)}
        for warps in (1, 4)
        for bits in (2, 4)
        for at in range(0, 11 - bits, bits)
    ]
    wrong = sum(row["differences"] for row in rows)
    return f"{len(rows)} products of subnormals, {wrong} elements not exact", rows, wrong == 0


def _model(device: torch.device, case: ModelCase) -> Finding:
    row = check_model(case, device)
    lines = [
        f"relative error {row['error']:.1e}, allowed {row['allowed']:.1e}; "
        f"the oracle's in this dtype {row['oracle_error']:.1e}"
    ]
    lines += [", ".join(row["providers"])]
    lines += [f"stays plain: {why}" for why in row["refused"]]
    lines += [f"no CUDA graph: {why}" for why in row["no_cuda_graph"] if why]
    return "\n".join(lines), [row], row["right"]


def _kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> Finding:
    lines, rows, right = [], [], True
    for recipe in _FORMATS:

        def checks(recipe: str = recipe) -> list[Check]:
            return list(check_kernels(recipe, dtype, head_dim, device, wanted="triton"))

        try:
            compiled, done = compile_ahead(checks), checks()
        except Exception as error:
            lines.append(f"{recipe}: FAILED {type(error).__name__}: {error}")
            rows.append({"recipe": recipe, "problem": str(error)})
            right = False
            continue
        failed = [c for c in done if not c.passed]
        lines.append(
            f"{recipe}: {len(done) - len(failed)} of {len(done)} right, the worst at "
            f"{worst(done):.2f} of what is allowed; {compiled} kernels"
        )
        lines += [f"  WRONG {c.name}: {c.problem or c.error}" for c in failed]
        rows += [asdict(c) for c in done]
        right = right and not failed
    return "\n".join(lines), rows, right


def _attention(device: torch.device, batch: int, tokens: int, launches: str = "graph") -> Finding:
    case = Case(batch, 32, 8, 128, tokens, torch.bfloat16, device)
    if case.needed_bytes > free_memory(device):
        return "not run: too little memory", [], True
    graphs = launches == "graph"
    (run,) = bench_attention([case], _RECIPES, rounds=20, graphs=graphs, go_on=True)
    rows = [{"launches": launches} | row for row in attention_json(run)]
    return str(attention_section(run)), rows, _right(run.results)


def _sizes(device: torch.device) -> Finding:
    """The gain of measured sizes over those of the table."""
    with patch.dict(os.environ, {TUNE_VARIABLE: "1"}):
        for recipe, (batch, tokens) in product(_RECIPES, _TUNED):
            case = Case(batch, 32, 8, 128, tokens, torch.bfloat16, device)
            made = packed_contender(case, recipe, case.query(0), case.cached(1), case.cached(2))
            made.calls[0]()
    lines, rows = [], []
    for t in tunings():
        table, chosen, w = asdict(t.table), asdict(t.chosen), t.workload
        changed = [f"{n} {table[n]} -> {chosen[n]}" for n in chosen if chosen[n] != table[n]]
        gain = t.table_ms / t.chosen_ms if t.table_ms and t.chosen_ms else None
        speed = "no time for the table's" if gain is None else f"{gain:.2f} x the table's speed"
        lines.append(
            f"{w.k_plan}, {w.v_plan} B={w.batch} T={w.capacity}: "
            f"{', '.join(changed) or 'as in the table'}; {speed}"
        )
        rows.append({**asdict(t), "gain": gain})
    right = all(row["gain"] is not None for row in rows)
    return "\n".join(lines) or "nothing was measured", rows, right


def _decode(device: torch.device) -> Finding:
    """A quarter of an 8B model's layers: all of them take too long to compile for every cache."""
    shape = replace(PRESETS["llama-3.1-8b"], layers=_DECODED_LAYERS)
    setting = Setting(shape.config(), _DECODED_TOKENS, _DECODE_BATCH, torch.bfloat16, device)
    results = bench_decode(setting, _RECIPES, rounds=20, go_on=True)
    rows = decode_json(setting, results)
    return str(decode_section(setting, results)), rows, _right(results)


def _right(results: Sequence[Result]) -> bool:
    """Whether all of ours ran, which peers need not, and nothing is wrong."""
    ours = [r for r in results if r.name.startswith("kvpass ")]
    return not any(r.wrong for r in results) and all(r.times_ms for r in ours)
