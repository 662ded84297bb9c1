"""The subject of decoding: a model's setting, and caches filled at random or by a prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import QuantizedLayer

from kvpass.bench.contenders import random_tokens
from kvpass.bench.models import CacheShape, cache_shape, check_sizes
from kvpass.bench.plans import handle_of, packed_states
from kvpass.errors import OptionError, unknown
from kvpass.machine import synchronize
from kvpass.options import INNER
from kvpass.plan import LayerPlan
from kvpass.tensor.packed import PackedKV

FILLS = ("random", "prompt")
# A filled cache, and what to say of how it was filled.
Filled = tuple[Any, str]
Step = Callable[[Any, Tensor, Any], Tensor]
# Relative error of a step's logits against the uncompiled model on the decoded cache, for one
# layer; it grows with the square root of their number. A wrong cache is off by more than 1.
LAYER_TOLERANCE = {
    # On a GPU the kernels' operands over packed tokens are fp16 (1.5e-3).
    torch.float32: 5e-3,
    torch.float16: 8e-3,
    # bf16 rounds every product to 2**-9: measured 0.035 on 12 layers, 0.096 on 32.
    torch.bfloat16: 5e-2,
}


@dataclass(frozen=True)
class Setting:
    """The task of all contenders, with a model of this transformers config.

    Attributes:
        context: tokens in the cache when the first step begins.
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
        check_sizes(context=self.context, batch=self.batch)
        if self.fill not in FILLS:
            raise OptionError(unknown("fill", self.fill, FILLS))
        if self.inner not in INNER:
            raise OptionError(unknown("inner compiler", self.inner, INNER))

    @property
    def shape(self) -> CacheShape:
        """Sizes of the model's cache."""
        return cache_shape(self.config)

    @property
    def tolerance(self) -> float:
        """Largest relative error of logits that counts as right."""
        return LAYER_TOLERANCE[self.dtype] * math.sqrt(self.shape.layers)

    def ids(self, length: int) -> Tensor:
        """Random token ids ``[B, length]``."""
        generator = torch.Generator(self.device).manual_seed(7)
        vocabulary, size = (
            self.config.get_text_config(decoder=True).vocab_size,
            (self.batch, length),
        )
        return torch.randint(vocabulary, size, generator=generator, device=self.device)

    def layer(self) -> tuple[Tensor, Tensor]:
        """Random keys and values ``[B, H, T, D]``; the same for every layer."""
        shape = (self.batch, self.shape.kv_heads, self.context, self.shape.head_dim)
        keys, values = (random_tokens(shape, self.dtype, self.device, seed) for seed in (1, 2))
        return keys, values


def step(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """One forward pass; logits ``[B, V]`` of the last token."""
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1]
    return logits


def filled(setting: Setting, model: Any, run: Step, new_cache: Callable[[], Any]) -> Filled:
    """A plain cache, filled as the setting says. A prompt is computed by ``run``, twice: a note
    says how many seconds that took at first, and then."""
    if setting.fill == "random":
        return random_cache(setting, new_cache()), ""
    seconds, prompt = [], setting.ids(setting.context)
    for _ in range(2):
        cache = new_cache()
        start = time.perf_counter()
        run(model, prompt, cache)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return cache, f"prefill {seconds[1]:.2f} s (the first {seconds[0]:.2f} s)"


def random_cache(setting: Setting, cache: Any) -> Any:
    """Fills ``cache`` with random keys and values; every layer copies them."""
    keys, values = setting.layer()
    for i in range(setting.shape.layers):
        cache.update(keys, values, i)
    return cache


def packed_cache(setting: Setting, plan: LayerPlan) -> Any:
    """The cache that a prefill leaves behind, without the prefill; every layer has this plan."""
    cache = DynamicCache(config=setting.config)
    plain, stored = setting.layer(), [plan.stored(kind) for kind in ("keys", "values")]
    held = (x if b is None else b.store(x) for x, (_, b, _) in zip(plain, stored, strict=True))
    states = packed_states(plan, *held)
    for layer in cache.layers:
        layer.lazy_initialization(*plain)
        layer.keys, layer.values = (
            handle_of([t.clone() for t in state], p, setting.context, setting.dtype, b)
            for state, (p, b, _) in zip(states, stored, strict=True)
        )
        if plan.keys.rope is not None:
            # All layers hold the same.
            layer.keys.hold("cos_sin", cache.layers[0].keys.cos_sin)
        for handle in (layer.keys, layer.values):
            handle.mark_dynamic()
    return cache


def _held(x: Tensor, context: int) -> Tensor:
    """The tokens that are written of a cache tensor, plain."""
    if isinstance(x, PackedKV):
        return x.decode()[:, :, : x.written if x.plan.room is not None else context]
    return x[:, :, :context]


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
            keys, values = (_held(x, setting.context) for x in (layer.keys, layer.values))
        plain.update(keys, values, i)
    return plain
