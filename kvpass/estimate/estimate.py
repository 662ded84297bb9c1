"""Memory, bytes per decode step and a roofline latency of caches that need not be there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvpass.cocktail.shares import EXACT, FEWEST
from kvpass.errors import PlanError, check, check_choice, check_whole, is_number
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.devices import Device
from kvpass.estimate.links import LINKS, Link, gathered
from kvpass.estimate.shapes import ModelShape, model_shape
from kvpass.format.shard import WHOLE, Shard
from kvpass.options import written_planner

PLAIN, FP8 = "plain", "fp8"
# Beyond this nobody asks: what fits so many tokens or sequences fits any number.
_MOST = 1 << 32
# From here on the smaller of two caches stays the smaller one.
_LONG = 1 << 24


@dataclass(frozen=True)
class Setting:
    """What is estimated.

    Attributes:
        config: a transformers config.
        device: what holds the model.
        batch: sequences.
        context: tokens of each prompt.
        dtype: of weights, of the plain cache and of exact tokens.
        efficiency: the share of the device's bandwidth, and of its peak throughput, that a step
            reaches. 1 is a bound that no kernel exceeds.
        devices: how many hold a part of every sequence each, see `kvpass.format.sharded_plan`. All
            of them run the whole model.
        link: what connects them.

    Raises:
        OptionError: if a value is not allowed.
    """

    config: Any
    device: Device
    batch: int = 1
    context: int = 32768
    dtype: torch.dtype = torch.bfloat16
    efficiency: float = 0.8
    devices: int = 1
    link: Link = LINKS["nvlink4"]

    def __post_init__(self) -> None:
        check_whole("batch", self.batch, 1)
        check_whole("context", self.context, 1)
        check_choice("dtype", self.dtype, (torch.bfloat16, torch.float16))
        fits = is_number(self.efficiency) and 0 < self.efficiency <= 1
        check("efficiency", self.efficiency, fits, "above 0, at most 1")
        check_whole("devices", self.devices, 1)

    @property
    def shard(self) -> Shard:
        """The part of the first device: none holds more."""
        return WHOLE if self.devices == 1 else Shard(0, self.devices, WHOLE.group)


@dataclass(frozen=True)
class Estimate:
    """What is predicted of one way to cache; of several devices that share every sequence, for one.

    Attributes:
        name: "plain", "fp8" (every element in 8 bits, scales not counted), a recipe, or the file of
            a plan.
        weights: bytes of the model's weights.
        held: bytes of the cache right after the prompt.
        bits: that store one element.
        read: bytes that a decode step reads, of weights and cache.
        ms: of a decode step, if it reaches the setting's efficiency; with what the link takes.
        compute_bound: whether operations take longer than reading.
        tokens_per_s: of all sequences.
        gathers: of a decode step, one after the other; 0 where each device holds all.
        sent: bytes that the device gives to all of them.
        link_ms: how long they take.
        layer: bytes of one layer's keys and values as they are, of all tokens: a prompt that is
            read in parts needs them beside the cache, one layer after the other.
        context: the largest at this batch, in tokens, that fits beside the weights; None: any.
        batch: the largest at this context; None: any.
        below_plain, below_fp8: from how many tokens on, at this batch, the cache is smaller than
            those; None: never.
        notes: what was assumed.
        problem: why there is no such cache for this model; all else is then 0.
    """

    name: str
    weights: int = 0
    held: int = 0
    bits: float = 0.0
    read: float = 0.0
    ms: float = 0.0
    compute_bound: bool = False
    tokens_per_s: float = 0.0
    gathers: int = 0
    sent: int = 0
    link_ms: float = 0.0
    layer: int = 0
    context: int | None = 0
    batch: int | None = 0
    below_plain: int | None = 0
    below_fp8: int | None = 0
    notes: tuple[str, ...] = ()
    problem: str = ""


def estimate(setting: Setting, names: Sequence[str]) -> list[Estimate]:
    """Estimates of the plain cache, of one in 8 bits, and of each recipe or file of a plan. On
    several devices the first two stay whole on each.

    Raises:
        OptionError: if a name is not known, or the config does not say what the model caches.
        PlanError: if the file of a plan cannot be read.
    """
    planners = {name: written_planner(name) for name in names}
    shape = model_shape(setting.config, setting.dtype)
    plain = ModelCache.plain(shape, setting.dtype)
    fp8 = ModelCache.plain(shape, torch.float8_e4m3fn)
    compare = partial(_estimate, setting=setting, shape=shape, plain=plain, fp8=fp8)
    found = [compare(name, cache, shard=WHOLE) for name, cache in ((PLAIN, plain), (FP8, fp8))]
    for name, way in planners.items():
        try:
            cache = ModelCache.packed(shape, way, setting.dtype, setting.shard)
        except PlanError as error:
            found.append(Estimate(name, problem=str(error)))
        else:
            found.append(compare(name, cache, shard=setting.shard))
    return found


def _estimate(
    name: str,
    cache: ModelCache,
    shard: Shard,
    setting: Setting,
    shape: ModelShape,
    plain: ModelCache,
    fp8: ModelCache,
) -> Estimate:
    batch, context, device = setting.batch, setting.context, setting.device
    bits, cached = cache.stored(batch, context)
    read = shape.read_weights(batch) + cached
    moving = read / device.bandwidth / setting.efficiency
    flops = 0.0 if device.flops is None else shape.flops(batch, context, shard) / device.flops
    computing = flops / setting.efficiency
    sent = gathered(shape, batch, context, setting.dtype, shard) if shard != WHOLE else []
    sending = sum(setting.link.seconds(nbytes, shard.size) for nbytes in sent)
    seconds = max(moving, computing) + sending
    budget = device.memory - shape.weights
    return Estimate(
        name,
        weights=shape.weights,
        held=cache.nbytes(batch, context),
        bits=bits,
        read=read,
        ms=1e3 * seconds,
        compute_bound=computing > moving,
        tokens_per_s=batch / seconds,
        gathers=len(sent),
        sent=sum(sent),
        link_ms=1e3 * sending,
        layer=batch * context * shape.largest_layer * setting.dtype.itemsize,
        context=_largest(lambda n: cache.nbytes(batch, n), budget),
        batch=_largest(lambda n: cache.nbytes(n, context), budget),
        below_plain=break_even(cache, plain, batch),
        below_fp8=break_even(cache, fp8, batch),
        notes=_notes(cache),
    )


def _notes(cache: ModelCache) -> tuple[str, ...]:
    found = []
    if cache.chunked:
        between = 1 - FEWEST - EXACT
        found.append(
            f"{FEWEST:.0%} of the chunks in the fewest bits, {EXACT:.1%} and what is left over "
            f"exact, {between:.1%} in what is between"
        )
    if len(cache.bits) > 1:
        kinds = ", ".join(f"{n} in {bits:g} bits" for bits, n in sorted(cache.bits.items()))
        found.append(f"of the keys and values of all layers, {kinds}")
    return tuple(found)


def _largest(used: Callable[[int], int], budget: int) -> int | None:
    """The largest n with ``used(n) <= budget``; 0 if there is none, None if there is no end.
    ``used`` never falls."""
    high = 1
    while used(high) <= budget:
        high *= 2
        if high > _MOST:
            return None
    return bisect_right(range(1, high), budget, key=used)


def break_even(cache: ModelCache, other: ModelCache, batch: int) -> int | None:
    """From how many tokens on ``cache`` is smaller than the plain ``other``; None: never.

    A packed cache has room for whole tiles, so that at first either may be the smaller one.
    """
    if cache.nbytes(batch, _LONG) >= other.nbytes(batch, _LONG):
        return None
    first = _LONG
    while first > 1:
        # Neither falls: so many tokens of `other` exceed all that `cache` may hold up to `first`.
        held = cache.nbytes(batch, first - 1)
        least = bisect_right(range(1, first), held, key=lambda n: other.nbytes(batch, n)) + 1
        if least >= first:
            break
        first = least
    return first
