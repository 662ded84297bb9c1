"""The table and the JSON rows of `kvpass.estimate.estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvpass.estimate.estimate import Estimate, Setting
from kvpass.format.dtypes import dtype_name
from kvpass.report import Section, number

_HEADER = (
    "cache", "GB held", "bits/element", "GB read/step", "ms/step", "tokens/s",
    "largest context", "largest batch", "below plain from", "below fp8 from",
)  # fmt: skip
_SHARED = ("KB sent/layer", "link ms/step")
_ROOM = (
    "GB are 1e9 bytes. Held: right after a prompt; generating may hold a quarter more, as room to "
    "grow. A packed cache has room for 256 tokens at least and an exact window, so it is smaller "
    "only from the stated context on."
)


def estimate_section(setting: Setting, estimates: Sequence[Estimate]) -> Section:
    """A row for each way to cache; what is assumed stands below."""
    device, shared = setting.device, setting.devices > 1
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
        *(_shared(setting, estimates[0].layer) if shared else ()),
        *(f"{e.name}: {note}." for e in estimates for note in e.notes),
    ]
    if bound := [e.name for e in estimates if e.compute_bound]:
        notes.append(f"Bound by operations, not by reading: {', '.join(bound)}.")
    if shared:
        title += f", on each of {setting.devices} devices that share the sequences"
    header = (*_HEADER[:6], *_SHARED, *_HEADER[6:]) if shared else _HEADER
    return Section(title, header, [_cells(e, shared) for e in estimates], notes)


def _shared(setting: Setting, layer: int) -> list[str]:
    link, hops = setting.link, setting.devices - 1
    return [
        f"Each of {setting.devices} devices holds all weights, and a part of the tokens; the first "
        "one, which has most of them, is shown. Plain and fp8 are whole on each.",
        f"Reading a prompt in parts needs at least {number(layer / 1e9)} GB beside the cache on "
        "each: one layer's keys and values as they are.",
        f"{link.name}: {link.bandwidth / 1e9:g} GB/s; each layer's gather takes "
        f"{1e6 * link.start:g} us, and {1e6 * link.hop:g} us in each of {hops} hops "
        f"({link.source}).",
    ]


def _cells(e: Estimate, shared: bool) -> list[str]:
    if e.problem:
        return [e.name, f"not possible: {e.problem}"]
    found = [number(e.held / 1e9), f"{e.bits:.2f}", number(e.read / 1e9), number(e.ms)]
    found.append(number(e.tokens_per_s))
    if shared:
        layer = e.sent / 1e3 / max(e.gathers, 1)
        found += [number(layer), number(e.link_ms)] if e.gathers else ["-", "-"]
    limits = ((e.context, "any"), (e.batch, "any"), (e.below_plain, "-"), (e.below_fp8, "-"))
    return [e.name, *found, *(none if n is None else f"{n:,}" for n, none in limits)]


def estimate_json(setting: Setting, estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """A row for each way to cache, with its setting."""
    common = {
        "model": setting.config.model_type,
        "device": asdict(setting.device),
        "dtype": dtype_name(setting.dtype),
        "efficiency": setting.efficiency,
        "devices": setting.devices,
        "link": asdict(setting.link),
        "at_batch": setting.batch,
        "at_context": setting.context,
    }
    return [{**common, **asdict(e)} for e in estimates]
