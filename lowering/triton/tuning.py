"""Sizes of decode attention, chosen by measurement where the user asks for that.

The table's answer and its neighbours are timed once for each kind of launch, when it is first
compiled or called. The winner is kept in ``<cache folder>/attention_sizes_<hash>.json``, named
after the GPU, the versions, the kernels' sources and the launch, so that no later process
measures it again.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvpass.errors import KernelError, OptionError, shown
from lowering.codegen import cache_folder, digest, sources_digest, write_atomically
from lowering.support import interpreted
from lowering.triton.heuristics import AttentionSizes, attention_candidates
from lowering.triton.launch import recording
from lowering.triton.layouts import layout_of

TUNE_VARIABLE = "KVPASS_TUNE"
# What is measured where a graph is compiled for any batch, and for any number of tokens.
NOMINAL_BATCH = 1
NOMINAL_CAPACITY = 32768
# With fewer tokens a step hardly waits for attention.
_MIN_CAPACITY = 4096
# Another answer than the table's must be faster by more than times vary.
_FASTER = 0.98


@dataclass(frozen=True)
class Workload:
    """What decides which sizes are fast, besides the device.

    Attributes:
        k_plan, v_plan: printed plans.
        key_dim, value_dim: channels of a head.
        dtype: the model's dtype.
        batch, kv_heads: sequences, and KV heads of each.
        rows: query rows of a KV head.
        capacity: tokens that there is room for.
    """

    k_plan: str
    v_plan: str
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    batch: int
    kv_heads: int
    rows: int
    capacity: int


@dataclass(frozen=True)
class Tuned:
    """The sizes for a workload: those of the table and the fastest ones, each with milliseconds of
    a call, None where it does not run."""

    workload: Workload
    table: AttentionSizes
    chosen: AttentionSizes
    table_ms: float | None
    chosen_ms: float | None


# Milliseconds of a call with each of the sizes, or why it has no time. Runs in a thread of its own,
# where no mode of the caller is on: tensors are real, nothing is traced.
Timer = Callable[[Workload, Sequence[AttentionSizes], torch.device], Sequence[float | str]]

_tuned: dict[tuple[Workload, AttentionSizes, torch.device], Tuned] = {}
# One measurement at a time; two at once would disturb each other.
_lock = threading.Lock()


def tunings() -> list[Tuned]:
    """What this process has measured, or has found measured."""
    return list(_tuned.values())


def enabled() -> bool:
    """Whether the user wants launches to be measured.

    Raises:
        OptionError: if the variable is neither 0 nor 1.
    """
    value = os.environ.get(TUNE_VARIABLE, "0")
    if value not in ("0", "1"):
        raise OptionError(f"{TUNE_VARIABLE}={shown(value)} is not supported; allowed: 0, 1.")
    return value == "1"


def cache_tag() -> str:
    """The key, besides the graph itself, under which compiled graphs are cached."""
    return f"kvpass-{sources_digest()}-{TUNE_VARIABLE}={int(enabled())}"


def measurable(device: torch.device) -> bool:
    """Whether launches on this device are measured: not where kernels are only recorded."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and not interpreted()
        and not recording()
        and enabled()
    )


def nominal_batch(batch: int | torch.SymInt) -> int:
    """The batch that is measured."""
    return batch if isinstance(batch, int) else NOMINAL_BATCH


def nominal_capacity(capacity: int | torch.SymInt) -> int:
    """The number of tokens that is measured: a power of two, so that a growing cache is measured
    a few times only."""
    return 1 << (capacity.bit_length() - 1) if isinstance(capacity, int) else NOMINAL_CAPACITY


def tuned_sizes(
    workload: Workload,
    table: AttentionSizes,
    device: torch.device,
    source: Callable[[AttentionSizes], str],
    timer: Timer,
) -> AttentionSizes:
    """The fastest of ``table`` and its neighbours, measured now if no file knows it.

    Args:
        workload: of the launch.
        table: sizes from the table.
        device: that is `measurable`.
        source: the kernels' source text for sizes.
        timer: see `Timer`.

    Raises:
        KernelError: if no sizes work.
    """
    if workload.capacity < _MIN_CAPACITY:
        return table
    key = (workload, table, device)
    if key not in _tuned:
        with _lock:
            if key not in _tuned:
                found = _find(workload, table, device, source, timer)
                if found is None:
                    return table
                _tuned[key] = found
    return _tuned[key].chosen


def _find(
    workload: Workload,
    table: AttentionSizes,
    device: torch.device,
    source: Callable[[AttentionSizes], str],
    timer: Timer,
) -> Tuned | None:
    """The sizes from the file, or measured; None while a CUDA graph is captured."""
    k = layout_of(workload.k_plan, workload.key_dim)
    v = layout_of(workload.v_plan, workload.value_dim)
    candidates = attention_candidates(table, k, v)
    key = {
        **device_facts(device),
        "kernels": digest("".join(map(source, candidates))),
        "launch": asdict(workload) | {"dtype": str(workload.dtype)},
        "candidates": [asdict(c) for c in candidates],
    }
    path = cache_folder() / f"attention_sizes_{digest(json.dumps(key))}.json"
    found = _read(path, key, workload, candidates)
    if found is not None or torch.cuda.is_current_stream_capturing():
        return found
    try:
        # Modes, dispatch keys, function transforms and Dynamo's hook are a thread's own, so that a
        # new thread has left the tracing that this may be called in, whatever that consists of.
        with ThreadPoolExecutor(1) as pool:
            results = pool.submit(timer, workload, candidates, device).result()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        _warn(f"sizes of attention cannot be measured on {device} ({reason}); a table gives them")
        return Tuned(workload, table, table, None, None)
    found = _fastest(workload, candidates, results, device)
    _write(path, key, found)
    return found


def _fastest(
    workload: Workload,
    candidates: Sequence[AttentionSizes],
    results: Sequence[float | str],
    device: torch.device,
) -> Tuned:
    """The fastest sizes, or the table's answer, the first, if it is about as fast."""
    pairs = list(zip(candidates, results, strict=True))
    times = {sizes: result for sizes, result in pairs if not isinstance(result, str)}
    table = candidates[0]
    if not times:
        raise KernelError(
            f"None of {len(candidates)} sizes of kvpass::attention works on {device} for keys "
            f"{workload.k_plan}, values {workload.v_plan}; the first: {results[0]}."
        )
    best = min(times, key=times.__getitem__)
    if table in times and times[best] > _FASTER * times[table]:
        best = table
    return Tuned(workload, table, best, times.get(table), times[best])


def device_facts(device: torch.device) -> dict[str, Any]:
    """The machine that a measurement holds for."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": [properties.major, properties.minor],
        "triton": triton.__version__,
    }


def _read(
    path: Path, key: dict[str, Any], workload: Workload, candidates: Sequence[AttentionSizes]
) -> Tuned | None:
    """The sizes in the file; None if there is none, or `_write` has not written it for this key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("written for another launch")
        # Ours, since 64.0 equals 64 but is no size; and nothing that was not to be measured.
        chosen = candidates[candidates.index(AttentionSizes(**content["sizes"]))]
        table_ms = None if content["table_ms"] is None else float(content["table_ms"])
        return Tuned(workload, candidates[0], chosen, table_ms, float(content["ms"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError):
        _warn(f"{path} does not hold the measured sizes that its name promises; measuring again")
        return None


def _write(path: Path, key: dict[str, Any], found: Tuned) -> None:
    sizes, times = asdict(found.chosen), {"ms": found.chosen_ms, "table_ms": found.table_ms}
    content = {"key": key, "sizes": sizes, **times}
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        _warn(f"measured sizes cannot be kept in {path}: {error.strerror}")


def _warn(message: str) -> None:
    warnings.warn(f"kvpass: {message}.", stacklevel=2)
