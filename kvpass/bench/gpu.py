"""``kvpass bench gpu``: in one run, all that only a GPU can settle."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from kvpass.backend import tunings
from kvpass.bench.attention import attention_section, bench_attention
from kvpass.bench.contenders import Case
from kvpass.bench.decode import bench_decode, decode_json, decode_section
from kvpass.bench.device import free_memory
from kvpass.bench.filling import Setting
from kvpass.bench.kernel_checks import check_kernels, worst
from kvpass.bench.models import PRESETS
from kvpass.bench.report import result_json, write_json
from kvpass.errors import OptionError

_RECIPES = ("kivi-4bit", "kivi-2bit")
_CALIBRATED = ("kvquant-nuq3-1%", "kvquant-nuq2")
# Whose kernels are checked; calibrated ones with random tokens, and SKVQ's without what comes from
# texts.
_FORMATS = ("fp", *_RECIPES, "skvq-k2v2,clip=0.9,reorder=false,sinks=0", *_CALIBRATED)
# Batch and tokens of the attention table, for the heads of an 8B Llama.
_CASES = ((1, 4096), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 8192))
# Model dtype and head dimension of the kernels that are checked. Kernels take minutes to compile,
# so that only the first, which all measurements use, comes before them.
_CHECKED = ((torch.bfloat16, 128), (torch.float16, 128), (torch.float16, 64))
_DECODED_TOKENS = 32768
# Compiling 32 layers for every contender takes that long.
_DECODE_SECONDS = 210
# Weights of 16 GB, the dense caches of three contenders and of the reference at 17 GB each.
_DECODE_BYTES = 110 << 30
_DECODE_BATCH = 4

Rows = list[dict[str, Any]]
# Text to print, rows for the file, and whether all is right.
Finding = tuple[str, Rows, bool]
_TOO_LATE: Finding = ("not begun: the time is up", [], False)


def bench_gpu(device: torch.device, path: str, minutes: float = 8) -> bool:
    """Checks kernels and subnormals, measures attention, what the choice of its sizes gains, and
    decoding, and writes after each part.

    A part that fails is reported, and the next one is run: a GPU may be at hand only once.

    Args:
        device: a CUDA GPU.
        path: JSON file to write.
        minutes: no part is begun later than this.

    Returns:
        Whether every part ran and every result was right.

    Raises:
        OptionError: if ``device`` is no GPU or the file cannot be written.
    """
    if device.type != "cuda":
        raise OptionError("'bench gpu' needs a CUDA GPU, but torch finds none here.")
    deadline = time.monotonic() + 60 * minutes
    rows: Rows = []
    fine = True
    for name, part in _parts(device, deadline):
        start = time.monotonic()
        text, found, right = _TOO_LATE if start > deadline else _attempt(part)
        seconds = time.monotonic() - start
        print(
            f"== {name}, {seconds:.0f} s: {'right' if right else 'NOT RIGHT'}\n{text}", flush=True
        )
        rows += [{"part": name} | row for row in found]
        rows.append({"part": name, "right": right, "seconds": seconds, "text": text})
        fine = fine and right
        write_json(path, "gpu", {"minutes": minutes}, rows)
    return fine


def _parts(device: torch.device, deadline: float) -> Iterator[tuple[str, Callable[[], Finding]]]:
    yield "subnormals", partial(_subnormals, device)
    kernels = [
        (f"kernels {dtype} D={dim}", partial(_kernels, device, dtype, dim))
        for dtype, dim in _CHECKED
    ]
    yield kernels[0]
    for batch, tokens in _CASES:
        yield f"attention B={batch} T={tokens}", partial(_attention, device, batch, tokens)
    yield "sizes", _sizes
    yield "decode", partial(_decode, device, deadline)
    yield from kernels[1:]


def _attempt(part: Callable[[], Finding]) -> Finding:
    try:
        return part()
    except Exception:
        return traceback.format_exc(), [], False
    finally:
        torch.cuda.empty_cache()


def _subnormals(device: torch.device) -> Finding:
    """2-bit and 4-bit codes at every position that the kernels use."""
    from kvpass.bench.subnormals import subnormal_differences

    rows: Rows = [
        {"bits": bits, "position": at, "differences": subnormal_differences(bits, at, device)}
        for bits in (2, 4)
        for at in range(0, 11 - bits, bits)
    ]
    wrong = sum(row["differences"] for row in rows)
    return f"{len(rows)} products of subnormals, {wrong} elements not exact", rows, wrong == 0


def _kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> Finding:
    lines, rows, right = [], [], True
    for recipe in _FORMATS:
        checks = list(check_kernels(recipe, dtype, head_dim, device, wanted="triton"))
        failed = [c for c in checks if not c.passed]
        lines.append(
            f"{recipe}: {len(checks) - len(failed)} of {len(checks)} right, the worst at "
            f"{worst(checks):.2f} of what is allowed"
        )
        lines += [f"  WRONG {c.name}: {c.problem or c.error}" for c in failed]
        rows += [asdict(c) for c in checks]
        right = right and not failed
    return "\n".join(lines), rows, right


def _attention(device: torch.device, batch: int, tokens: int) -> Finding:
    case = Case(batch, 32, 8, 128, tokens, torch.bfloat16, device)
    if case.needed_bytes > free_memory(device):
        return "not run: too little memory", [], True
    (run,) = bench_attention([case], _RECIPES, rounds=20)
    rows = [
        {"batch": batch, "tokens": tokens, "copy_gb_s": run.copy_gb_s} | result_json(r)
        for r in run.results
    ]
    return str(attention_section(run)), rows, not any(r.wrong for r in run.results)


def _sizes() -> Finding:
    """What measuring the sizes of the attention above has gained over the table."""
    lines, rows = [], []
    for t in tunings():
        table, chosen, w = asdict(t.table), asdict(t.chosen), t.workload
        changed = [f"{n} {table[n]} -> {chosen[n]}" for n in chosen if chosen[n] != table[n]]
        gain = t.table_ms / t.chosen_ms if t.table_ms and t.chosen_ms else None
        told = "no time for the table's" if gain is None else f"{gain:.2f} x the table's speed"
        lines.append(
            f"{w.k_plan}, {w.v_plan} B={w.batch} T={w.capacity}: "
            f"{', '.join(changed) or 'as in the table'}; {told}"
        )
        rows.append({**asdict(t), "gain": gain})
    right = all(row["gain"] is not None for row in rows)
    return "\n".join(lines) or "nothing was measured", rows, right


def _decode(device: torch.device, deadline: float) -> Finding:
    """The 8B shape; a quarter of its layers where time or memory do not suffice."""
    shape = PRESETS["llama-3.1-8b"]
    if free_memory(device) < _DECODE_BYTES or deadline - time.monotonic() < _DECODE_SECONDS:
        shape = replace(shape, layers=shape.layers // 4)
    setting = Setting(shape.config(), _DECODED_TOKENS, _DECODE_BATCH, torch.bfloat16, device)
    results = bench_decode(setting, _RECIPES, rounds=20)
    rows = [decode_json(setting, r) | result_json(r) for r in results]
    right = not any(r.wrong for r in results)
    return str(decode_section(setting, results)), rows, right
