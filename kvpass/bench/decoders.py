"""Contenders for decoding: a model with packed caches, and with the caches of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import mark_dynamic
from kvpass.bench.filling import (
    Filled,
    Setting,
    Step,
    decoded_cache,
    filled,
    packed_cache,
    random_cache,
    step,
)
from kvpass.bench.plans import layer_plan
from kvpass.bench.timing import Contender, relative_error
from kvpass.inspect.report import reports
from kvpass.plan import Plan

EAGER_NAME = "eager, DynamicCache"


def new_step(name: str) -> Step:
    """`step` with a code object of its own.

    Dynamo keeps graphs and checks their guards per code object, and no contender should wait for
    the guards of another.
    """
    code = step.__code__.replace(co_name=name)
    return FunctionType(code, step.__globals__, name)


@dataclass
class _Decoding:
    """The model with one cache, which is filled when its turn comes. Its first step is checked."""

    setting: Setting
    model: Any
    run: Step
    fill: Callable[[], Filled]
    cache: Any = None
    expected: Tensor | None = None
    note: str = ""
    first_report: int = 0

    def prepare(self) -> None:
        """Fills the cache and computes the logits that are expected."""
        self.first_report = max((r.index + 1 for r in reports()), default=0)
        with torch.no_grad():
            self.cache, self.note = self.fill()
            plain = decoded_cache(self.setting, self.cache)
            self.expected = step(self.model, self.setting.ids(1), plain)

    def error(self, logits: Tensor) -> float:
        """The relative error of the first step."""
        assert self.expected is not None
        return relative_error(logits, self.expected)

    def describe(self) -> str:
        """Note on how the cache was filled, its bytes, and the providers of all ops."""
        made = [r for r in reports() if r.index >= self.first_report]
        choices = Counter(f"{c.op} by {c.provider}" for r in made for c in r.choices)
        parts = [self.note, *(f"{text} x{count}" for text, count in choices.items())]
        parts += sorted({f"graphs run by {r.inner}" for r in made})
        if not isinstance(self.cache, QuantizedCache):
            held = sum(int(t.nbytes) for c in self.cache.layers for t in (c.keys, c.values))
            parts.append(f"cache of {held / 2**20:.1f} MiB")
        return ", ".join(filter(None, parts))

    def contender(self, name: str, required: bool = False) -> Contender:
        """The contender that takes a step at each call."""
        ids = self.setting.ids(1)

        def call() -> Tensor:
            with torch.no_grad():
                return self.run(self.model, ids, self.cache)

        return Contender(
            name, [call], self.error, self.setting.tolerance,
            prepare=self.prepare, required=required, after_first=self.describe,
        )  # fmt: skip


def packed_contender(
    setting: Setting, model: Any, recipe: str, mode: str | None = None
) -> Contender:
    """The model compiled by kvpass under ``recipe``, in this mode of Inductor."""
    plan = Plan(layer_plan(recipe, *setting.layer()), recipe=recipe)
    # Strict: a part that runs unpacked must not be timed as if it were packed.
    options: dict[str, Any] = {"recipe": plan, "strict": True, "inner": setting.inner, "mode": mode}
    run = torch.compile(new_step("packed_step"), backend="kvpass", options=options)

    def fill() -> Filled:
        if setting.fill == "prompt":
            return filled(setting, model, run, partial(DynamicCache, config=setting.config))
        return packed_cache(setting, plan.default), ""

    name = f"kvpass {recipe}" + (f", {mode}" if mode else "")
    return _Decoding(setting, model, run, fill).contender(name, required=True)


def packed_static_contender(setting: Setting, model: Any, recipe: str, room: int) -> Contender:
    """The same with a static cache of ``room`` tokens, on a GPU in CUDA graphs. A step that is not
    timed packs what the cache was filled with."""
    plan = Plan(layer_plan(recipe, *setting.layer()), recipe=recipe)
    options: dict[str, Any] = {"recipe": plan, "inner": setting.inner, "mode": "reduce-overhead"}
    run: Step = torch.compile(new_step("packed_static_step"), backend="kvpass", options=options)

    def fill() -> Filled:
        cache = StaticCache(config=setting.config, max_cache_len=room)
        with torch.no_grad():
            run(model, setting.ids(1), random_cache(setting, cache))
        return cache, "random tokens, packed by a step"

    name = f"kvpass {recipe}, StaticCache, reduce-overhead"
    return _Decoding(setting, model, run, fill).contender(name, required=True)


def plain_contenders(setting: Setting, model: Any, room: int) -> list[Contender]:
    """The model with the caches of transformers: eager, under ``torch.compile``, there also with a
    static cache of ``room`` tokens, on a GPU in CUDA graphs, and eager with 4-bit caches. Where
    what these need is not installed, their results say so."""
    dynamic = partial(DynamicCache, config=setting.config)
    static = partial(StaticCache, config=setting.config, max_cache_len=room)
    graphs = setting.device.type == "cuda" and setting.inner == "inductor"
    mode = "reduce-overhead" if graphs else None
    static_name = "compile, StaticCache" + (f", {mode}" if mode else "")
    compiled: Step = torch.compile(new_step("dynamic_step"), backend=setting.inner)
    compiled_static: Step = torch.compile(new_step("static_step"), backend=setting.inner, mode=mode)
    eager = new_step("eager_step")
    # Name, what computes steps, what computes a prompt, and the cache. As in `generate`, the prompt
    # of a static cache is not compiled.
    peers: list[tuple[str, Step, Step, Callable[[], Any]]] = [
        (EAGER_NAME, eager, eager, dynamic),
        ("compile, DynamicCache", compiled, compiled, dynamic),
        (static_name, compiled_static, new_step("static_prefill"), static),
    ]
    for backend in ("quanto", "hqq"):
        run = new_step(f"{backend}_step")
        quantized = partial(QuantizedCache, backend=backend, config=setting.config, nbits=4)
        peers.append((f"eager, QuantizedCache {backend} 4bit", run, run, quantized))
    return [
        _Decoding(
            setting, model, run, partial(_filled_and_marked, setting, model, prompt_run, new_cache)
        ).contender(name)
        for name, run, prompt_run, new_cache in peers
    ]


def _filled_and_marked(*arguments: Any) -> Filled:
    """`filled`, with dynamic lengths where a cache grows."""
    cache, note = filled(*arguments)
    for layer in cache.layers if isinstance(cache, DynamicCache) else ():
        mark_dynamic(layer.keys, 2)
        mark_dynamic(layer.values, 2)
    return cache, note
