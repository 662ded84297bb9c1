"""The table and the JSON rows of `kvpass.estimate.estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvpass.bench.report import Section, number
from kvpass.estimate.estimate import Estimate, Setting
from kvpass.format.dtypes import dtype_name

_HEADER = (
    "cache", "GB held", "bits/element", "GB read/step", "ms/step", "tokens/s",
    "largest context", "largest batch", "below plain from", "below fp8 from",
)  # fmt: skip
_ROOM = (
    "GB are 1e9 bytes. Held: right after a prompt; generating may hold a quarter more, as room to "
    "grow. A packed cache has room for 256 tokens at least and an exact window, so it is smaller "
    "only from the stated context on."
)


def estimate_section(setting: Setting, estimates: Sequence[Estimate]) -> Section:
    """A row for each way to cache; what is assumed stands below."""
    device = setting.device
    title = (
        f"Predicted: {setting.config.model_type} in {dtype_name(setting.dtype)} on {device.name}, "
        f"batch {setting.batch}, {setting.context:,} tokens"
    )
    throughput = "" if device.flops is None else f" and {device.flops / 1e12:g} TFLOP/s"
    notes = [
        f"{device.name}: {device.memory / 1e9:g} GB, {device.bandwidth / 1e9:g} GB/s{throughput} "
        f"({device.source}), of which a step reaches {setting.efficiency:.0%}.",
        f"Weights: {number(estimates[0].weights / 1e9)} GB beside the cache.",
        _ROOM,
        *(f"{e.name}: {note}." for e in estimates for note in e.notes),
    ]
    if bound := [e.name for e in estimates if e.compute_bound]:
        notes.append(f"Bound by operations, not by reading: {', '.join(bound)}.")
    return Section(title, _HEADER, list(map(_cells, estimates)), notes)


def _cells(e: Estimate) -> list[str]:
    if e.problem:
        return [e.name, f"not possible: {e.problem}"]
    found = [number(e.held / 1e9), f"{e.bits:.2f}", number(e.read / 1e9), number(e.ms)]
    found.append(number(e.tokens_per_s))
    limits = ((e.context, "any"), (e.batch, "any"), (e.below_plain, "-"), (e.below_fp8, "-"))
    return [e.name, *found, *(none if n is None else f"{n:,}" for n, none in limits)]


def estimate_json(setting: Setting, estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """A row for each way to cache, with its setting."""
    common = {
        "model": setting.config.model_type,
        "device": asdict(setting.device),
        "dtype": dtype_name(setting.dtype),
        "efficiency": setting.efficiency,
        "at_batch": setting.batch,
        "at_context": setting.context,
    }
    return [{**common, **asdict(e)} for e in estimates]
