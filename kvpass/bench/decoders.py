"""Who decodes: one model with packed caches, and with the caches of transformers."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
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
    dynamic_cache,
    packed_cache,
    prefill,
    random_cache,
    step,
)
from kvpass.bench.plans import layer_plan
from kvpass.bench.timing import Contender, Result, relative_error
from kvpass.inspect.report import reports
from kvpass.plan import Plan

EAGER_NAME = "eager, DynamicCache"
_QUANTIZED = {"quanto": "optimum.quanto", "hqq": "hqq"}


def new_step(name: str) -> Step:
    """`step` with a code object of its own.

    Dynamo keeps graphs and checks their guards per code object, and no contender should wait for
    the guards of another.
    """
    code = step.__code__.replace(co_name=name)
    return FunctionType(code, step.__globals__, name)


class _Decoding:
    """The model with one cache, which is filled when its turn comes. Its first step is checked."""

    def __init__(self, setting: Setting, model: Any, run: Step, fill: Callable[[], Filled]) -> None:
        self._setting, self._model, self._run, self._fill = setting, model, run, fill
        self._ids = setting.ids(1)
        self._cache: Any = None
        self._expected: Tensor | None = None
        self._note = ""
        self._first_report = 0

    def prepare(self) -> None:
        """Fills the cache and computes the logits that are expected."""
        self._first_report = max((r.index + 1 for r in reports()), default=0)
        with torch.no_grad():
            self._cache, self._note = self._fill()
            plain = decoded_cache(self._setting, self._cache)
            self._expected = step(self._model, self._ids, plain)

    def call(self) -> Tensor:
        """One step."""
        with torch.no_grad():
            return self._run(self._model, self._ids, self._cache)

    def error(self, logits: Tensor) -> float:
        """Of the first step."""
        assert self._expected is not None
        return relative_error(logits, self._expected)

    def describe(self) -> str:
        """How the cache was filled, what it holds, and who computes what."""
        made = [r for r in reports() if r.index >= self._first_report]
        choices = Counter(f"{c.op} by {c.provider}" for r in made for c in r.choices)
        parts = [self._note, *(f"{text} x{count}" for text, count in choices.items())]
        parts += sorted({f"graphs run by {r.inner}" for r in made})
        if not isinstance(self._cache, QuantizedCache):
            held = sum(int(t.nbytes) for c in self._cache.layers for t in (c.keys, c.values))
            parts.append(f"cache of {held / 2**20:.1f} MiB")
        return ", ".join(filter(None, parts))

    def contender(self, name: str, required: bool = False) -> Contender:
        """To be measured."""
        tolerance = self._setting.tolerance
        return Contender(
            name, [self.call], self.error, tolerance,
            prepare=self.prepare, required=required, after_first=self.describe,
        )  # fmt: skip


def packed_contender(setting: Setting, model: Any, recipe: str) -> Contender:
    """The model compiled by kvpass under ``recipe``."""
    plan = Plan(layer_plan(recipe, *setting.layer()), recipe=recipe)
    # Strict: a part that runs unpacked must not be timed as if it were packed.
    options: dict[str, Any] = {"recipe": plan, "strict": True, "inner": setting.inner}
    run = torch.compile(new_step("packed_step"), backend="kvpass", options=options)

    def fill() -> Filled:
        if setting.fill == "prompt":
            return prefill(setting, model, run, lambda: DynamicCache(config=setting.config))
        return packed_cache(setting, plan.default), ""

    decoding = _Decoding(setting, model, run, fill)
    return decoding.contender(f"kvpass {recipe}", required=True)


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

    decoding = _Decoding(setting, model, run, fill)
    return decoding.contender(f"kvpass {recipe}, StaticCache, reduce-overhead", required=True)


def eager_contender(setting: Setting, model: Any) -> Contender:
    """The model as transformers runs it."""
    run = new_step("eager_step")
    decoding = _Decoding(setting, model, run, partial(dynamic_cache, setting, model, run))
    return decoding.contender(EAGER_NAME)


def dynamic_contender(setting: Setting, model: Any) -> Contender:
    """The model under ``torch.compile`` with the cache that ``generate`` makes."""
    run: Step = torch.compile(new_step("dynamic_step"), backend=setting.inner)

    def fill() -> Filled:
        cache, note = dynamic_cache(setting, model, run)
        for layer in cache.layers:
            mark_dynamic(layer.keys, 2)
            mark_dynamic(layer.values, 2)
        return cache, note

    decoding = _Decoding(setting, model, run, fill)
    return decoding.contender("compile, DynamicCache")


def static_contender(setting: Setting, model: Any, room: int) -> Contender:
    """The model under ``torch.compile`` with a static cache of ``room`` tokens; on a GPU with
    CUDA graphs, which is what static caches are for."""
    mode = "reduce-overhead" if setting.device.type == "cuda" else None
    compiled = setting.inner == "inductor"
    run: Step = torch.compile(
        new_step("static_step"), backend=setting.inner, mode=mode if compiled else None
    )

    def new_cache() -> Any:
        return StaticCache(config=setting.config, max_cache_len=room)

    def fill() -> Filled:
        if setting.fill == "prompt":
            # As `generate` does: the prompt of a static cache is not compiled.
            return prefill(setting, model, new_step("static_prefill"), new_cache)
        return random_cache(setting, new_cache()), ""

    decoding = _Decoding(setting, model, run, fill)
    name = "compile, StaticCache" + (f", {mode}" if mode and compiled else "")
    return decoding.contender(name)


def quantized_contenders(setting: Setting, model: Any) -> tuple[list[Contender], list[Result]]:
    """transformers' ``QuantizedCache`` (4 bits, uncompiled) with every library that is installed;
    for the others a result that says so."""
    contenders, missing = [], []
    for backend, module in _QUANTIZED.items():
        name = f"eager, QuantizedCache {backend} 4bit"
        if not _installed(module):
            problem = f"{module.replace('.', '-')} is not installed"
            missing.append(Result(name, setting.tolerance, problem=problem))
            continue
        contenders.append(_quantized_contender(setting, model, name, backend))
    return contenders, missing


def _quantized_contender(setting: Setting, model: Any, name: str, backend: str) -> Contender:
    run = new_step(f"{backend}_step")

    def new_cache() -> Any:
        return QuantizedCache(backend=backend, config=setting.config, nbits=4)

    def fill() -> Filled:
        if setting.fill == "prompt":
            return prefill(setting, model, run, new_cache)
        return random_cache(setting, new_cache()), ""

    return _Decoding(setting, model, run, fill).contender(name)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
