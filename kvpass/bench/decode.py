"""``kvpass bench decode``: tokens per second, packed caches against those of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kvpass.bench.decoders import (
    EAGER_NAME,
    dynamic_contender,
    eager_contender,
    packed_contender,
    packed_static_contender,
    quantized_contenders,
    static_contender,
)
from kvpass.bench.device import require_memory
from kvpass.bench.filling import Setting
from kvpass.bench.memory import cache_bytes
from kvpass.bench.models import model_bytes, random_model
from kvpass.bench.plans import check_recipe
from kvpass.bench.report import Section, number, timing_cells
from kvpass.bench.timing import Contender, Result, made_or_failing, measure

_WARM_UP = 3
# Plain caches that are alive at once: three contenders and the reference.
_PLAIN_CACHES = 4


@torch.no_grad()
def bench_decode(
    setting: Setting,
    recipes: Sequence[str],
    rounds: int = 20,
    *,
    progress: bool = True,
    go_on: bool = False,
) -> list[Result]:
    """Times decode steps of a model with random weights, with packed and with plain caches.

    A repetition decodes one token per sequence and keeps it, so contexts grow by ``rounds``.

    Args:
        setting: the model and its context.
        recipes: names of recipes.
        rounds: timed steps of each contender.
        progress: show a bar.
        go_on: a recipe that fails becomes a result with a ``problem``.

    Raises:
        OptionError: if a recipe is not known, the model has layers that are not packed, or
        memory does not suffice.
        PlanError: if a recipe does not fit the head dimension.
    """
    shape = setting.shape
    for name in recipes:
        check_recipe(name, shape.head_dim)
    plain = cache_bytes(None, shape, setting.batch, setting.context, setting.dtype.itemsize)
    what = f"Decoding at {setting.context} tokens with batch {setting.batch}"
    weights = model_bytes(setting.config, setting.dtype)
    require_memory(weights + _PLAIN_CACHES * plain, setting.device, what)
    torch.compiler.reset()
    model = random_model(setting.config, setting.dtype, setting.device)
    # A packed static cache takes a step more, by which it is packed.
    room = setting.context + 2 + _WARM_UP + rounds
    installed, missing = quantized_contenders(setting, model)
    contenders = [
        *_packed(setting, model, recipes, room, go_on),
        eager_contender(setting, model),
        dynamic_contender(setting, model),
        static_contender(setting, model, room),
        *installed,
    ]
    results = measure(contenders, rounds, setting.device, warm_up=_WARM_UP, progress=progress)
    return results + missing


def _packed(
    setting: Setting, model: Any, recipes: Sequence[str], room: int, go_on: bool
) -> Iterator[Contender]:
    """By recipe; on a GPU also with static caches, whose steps CUDA graphs replay."""
    for name in recipes:
        make = partial(packed_contender, setting, model, name)
        yield made_or_failing(f"kvpass {name}", make, go_on)
    for name in recipes if setting.device.type == "cuda" else ():
        static = partial(packed_static_contender, setting, model, name, room)
        yield made_or_failing(f"kvpass {name}, StaticCache", static, go_on)


def decode_section(setting: Setting, results: Sequence[Result]) -> Section:
    """The table. Speed-ups are medians of a peer over medians of the row."""
    peers = [r for r in results if r.times_ms and not r.name.startswith("kvpass ")]
    shown = [r for r in peers if r.name == EAGER_NAME]
    best = min(peers, key=lambda r: r.median_ms, default=None)
    shown += [best] if best is not None and best not in shown else []
    header = ["decode", "ms/step", "p25-p75", "tokens/s", *(f"x {p.name}" for p in shown)]
    header += ["first step s", "warm-up s", "error"]
    rows = []
    for result in results:
        cells = timing_cells(result)
        if result.times_ms:
            cells += [number(tokens_per_second(setting, result))]
            cells += [f"{p.median_ms / result.median_ms:.2f}" for p in shown]
            cells += [number(result.first_call_s), number(result.warm_up_s)]
            cells += [f"{result.error:.1e}"]
        rows.append(cells)
    shape = setting.shape
    title = (
        f"{setting.context} tokens ({setting.fill}), batch {setting.batch}, {shape.layers} layers, "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, "
        f"{str(setting.dtype).removeprefix('torch.')} on {setting.device}"
    )
    return Section(title, header, rows, [f"{r.name}: {r.note}" for r in results if r.note])


def tokens_per_second(setting: Setting, result: Result) -> float:
    """Of the whole batch, at the median."""
    return setting.batch * 1e3 / result.median_ms


def decode_json(setting: Setting, result: Result) -> dict[str, Any]:
    """What the JSON file holds beside the result itself."""
    speed = tokens_per_second(setting, result) if result.times_ms else None
    return {"context": setting.context, "batch": setting.batch, "tokens_per_s": speed}
