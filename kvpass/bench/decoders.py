"""Who decodes: one model with packed caches, and with the caches of transformers."""

from __future__ import annotations

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import mark_dynamic
from kvpass.bench.contenders import random_tokens
from kvpass.bench.models import CacheShape, cache_shape
from kvpass.bench.timing import Contender, Result, relative_error, synchronize
from kvpass.cache.packed import PackedKV
from kvpass.errors import OptionError, unknown
from kvpass.inspect.report import reports
from kvpass.options import INNER
from kvpass.recipes import recipe as recipe_of

EAGER_NAME = "eager, DynamicCache"
FILLS = ("random", "prompt")
# A filled cache, and what to say of how it was filled.
Filled = tuple[Any, str]
Step = Callable[[Any, Tensor, Any], Tensor]
# Relative error of a step's logits against the uncompiled model on the decoded cache, for one
# layer; it grows with the square root of their number. A wrong cache is off by more than 1.
_LAYER_TOLERANCE = {
    # On a GPU the kernels' operands over packed tokens are fp16 (1.5e-3).
    torch.float32: 5e-3,
    torch.float16: 8e-3,
    # bf16 rounds every product to 2**-9: measured 0.035 on 12 layers, 0.096 on 32.
    torch.bfloat16: 5e-2,
}
_QUANTIZED = {"quanto": "optimum.quanto", "hqq": "hqq"}


@dataclass(frozen=True)
class Setting:
    """What all contenders decode.

    Attributes:
        config: transformers config of the model.
        context: tokens in the cache when the first step begins.
        batch: sequences.
        dtype, device: of the model.
        fill: ``random`` keys and values, or a ``prompt`` that is prefilled.
        inner: what compiles graphs: ``inductor``, or ``eager`` to run them op by op.

    Raises:
        OptionError: if a value is not allowed.
    """

    config: Any
    context: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    fill: str = "random"
    inner: str = "inductor"

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} is not supported; at least 1.")
        if self.fill not in FILLS:
            raise OptionError(unknown("fill", self.fill, FILLS))
        if self.inner not in INNER:
            raise OptionError(unknown("inner compiler", self.inner, INNER))

    @property
    def shape(self) -> CacheShape:
        """Of the model's cache."""
        return cache_shape(self.config)

    @property
    def tolerance(self) -> float:
        """Largest relative error of logits that counts as right."""
        return _LAYER_TOLERANCE[self.dtype] * math.sqrt(self.shape.layers)

    def ids(self, length: int) -> Tensor:
        """Random token ids ``[B, length]``."""
        generator = torch.Generator(self.device).manual_seed(7)
        vocabulary = self.config.get_text_config(decoder=True).vocab_size
        size = (self.batch, length)
        return torch.randint(vocabulary, size, generator=generator, device=self.device)

    def layer(self) -> tuple[Tensor, Tensor]:
        """Random keys and values ``[B, H, T, D]``; the same for every layer, which copies them."""
        shape = (self.batch, self.shape.kv_heads, self.context, self.shape.head_dim)
        keys, values = (random_tokens(shape, self.dtype, self.device, seed) for seed in (1, 2))
        return keys, values


def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """One forward pass; logits ``[B, V]`` of the last token."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1]
    return logits


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


def decoded_cache(setting: Setting, cache: Any) -> Any:
    """A plain cache with what ``cache`` holds, which stays as it is."""
    plain = DynamicCache(config=setting.config)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, QuantizedLayer):
            # transformers' quantized layers answer an update, here by nothing, with all tokens.
            shape = (setting.batch, setting.shape.kv_heads, 0, setting.shape.head_dim)
            nothing = torch.empty(shape, dtype=setting.dtype, device=setting.device)
            keys, values = layer.update(nothing, nothing)
        else:
            keys, values = (
                (x.decode() if isinstance(x, PackedKV) else x)[:, :, : setting.context]
                for x in (layer.keys, layer.values)
            )
        plain.update(keys, values, i)
    return plain


def packed_contender(setting: Setting, model: Any, recipe: str) -> Contender:
    """The model compiled by kvpass under ``recipe``."""
    chosen = recipe_of(recipe)
    # Strict: a part that runs unpacked must not be timed as if it were packed.
    options: dict[str, Any] = {"recipe": chosen, "strict": True, "inner": setting.inner}
    run = torch.compile(new_step("packed_step"), backend="kvpass", options=options)

    def fill() -> Filled:
        if setting.fill == "prompt":
            return prefill(setting, model, run, lambda: DynamicCache(config=setting.config))
        return _packed_cache(setting, chosen.plan(setting.config)), ""

    decoding = _Decoding(setting, model, run, fill)
    return decoding.contender(f"kvpass {recipe}", required=True)


def eager_contender(setting: Setting, model: Any) -> Contender:
    """The model as transformers runs it."""
    run = new_step("eager_step")
    decoding = _Decoding(setting, model, run, partial(_dynamic_cache, setting, model, run))
    return decoding.contender(EAGER_NAME)


def dynamic_contender(setting: Setting, model: Any) -> Contender:
    """The model under ``torch.compile`` with the cache that ``generate`` makes."""
    run: Step = torch.compile(new_step("dynamic_step"), backend=setting.inner)

    def fill() -> Filled:
        cache, note = _dynamic_cache(setting, model, run)
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
        return _random_cache(setting, new_cache()), ""

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
        return _random_cache(setting, new_cache()), ""

    return _Decoding(setting, model, run, fill).contender(name)


def prefill(setting: Setting, model: Any, run: Step, new_cache: Callable[[], Any]) -> Filled:
    """A cache that a prompt has filled, and the seconds that took: at first, then again."""
    seconds = []
    prompt = setting.ids(setting.context)
    for _ in range(2):
        cache = new_cache()
        start = time.perf_counter()
        run(model, prompt, cache)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return cache, f"prefill {seconds[1]:.2f} s (the first {seconds[0]:.2f} s)"


def _dynamic_cache(setting: Setting, model: Any, run: Step) -> Filled:
    cache = DynamicCache(config=setting.config)
    if setting.fill == "prompt":
        return prefill(setting, model, run, lambda: DynamicCache(config=setting.config))
    return _random_cache(setting, cache), ""


def _random_cache(setting: Setting, cache: Any) -> Any:
    keys, values = setting.layer()
    for i in range(setting.shape.layers):
        cache.update(keys.clone(), values.clone(), i)
    return cache


def _packed_cache(setting: Setting, plan: Any) -> Any:
    """What a prefill leaves behind, without the prefill."""
    cache = DynamicCache(config=setting.config)
    plain = setting.layer()
    for i, layer in enumerate(cache.layers):
        plans = (plan.layer_at(i).keys, plan.layer_at(i).values)
        if i == 0:
            states = [torch.ops.kvpass.pack(x, str(p)) for x, p in zip(plain, plans, strict=True)]
        handles = [
            PackedKV([t.clone() for t in state], p, setting.context, setting.dtype)
            for state, p in zip(states, plans, strict=True)
        ]
        layer.lazy_initialization(*plain)
        layer.keys, layer.values = handles
        for handle in handles:
            handle.mark_dynamic()
    return cache


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
