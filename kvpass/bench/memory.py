"""``kvpass bench memory``: what fits into a byte budget, by arithmetic that real caches confirm."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

import kvpass.ops.pack  # noqa: F401  (registers the op)
from kvpass.bench.models import CacheShape
from kvpass.bench.report import Section
from kvpass.errors import OptionError, shown
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
from kvpass.recipes import written_recipe as recipe_of
from kvpass.tensor.packed import PackedKV

# Lengths around packed runs, tiles and the smallest capacity, at which real caches are made.
CHECKED_TOKENS = (1, 128, 257, 700)
_END_BYTES = 4
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """What fits.

    Attributes:
        name: of the recipe, or ``plain`` for the model's own cache.
        context: most tokens, at the given batch.
        batch: most sequences, at the given context.
        error: how far bytes really held were from the arithmetic; 0 unless that is wrong.
    """

    name: str
    context: int
    batch: int
    error: int


def parse_bytes(text: str) -> int:
    """``16GiB``, ``80G`` or ``500000`` as bytes.

    Raises:
        OptionError: if it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"Size {shown(text)} cannot be read; allowed: e.g. 16GiB, 80G, 500000.")
    return int(float(match[1]) * _UNITS[match[2]])


def tensor_bytes(
    plan: TensorPlan, batch: int, kv_heads: int, head_dim: int, tokens: int, itemsize: int
) -> int:
    """Bytes that the keys or values of one layer hold right after a prompt of ``tokens``.

    While tokens are generated the packed segment grows by a quarter at a time, so up to that much
    more may be spare.
    """
    plan.one_codec()
    codec, capacity = plan.codec, plan.capacity(plan.packed(tokens))
    ends = batch * len(plan.segments) * _END_BYTES
    if codec.identity:
        return batch * kv_heads * capacity * head_dim * itemsize + ends
    codes = capacity * codec.words.count(head_dim) * 2
    params = capacity * head_dim // codec.group * 4
    window = plan.ring_slots(tokens - plan.sinks) * head_dim * itemsize
    return batch * kv_heads * (codes + params + window) + ends


def cache_bytes(
    plan: LayerPlan | None, shape: CacheShape, batch: int, tokens: int, itemsize: int
) -> int:
    """Bytes of a model's whole cache after a prompt; ``plan`` None is the plain cache."""
    heads, dim = shape.kv_heads, shape.head_dim
    if plan is None:
        return shape.layers * 2 * batch * heads * tokens * dim * itemsize
    return shape.layers * sum(
        tensor_bytes(p, batch, heads, dim, tokens, itemsize) for p in (plan.keys, plan.values)
    )


def held_bytes(
    plan: LayerPlan, shape: CacheShape, batch: int, tokens: int, dtype: torch.dtype
) -> int:
    """Bytes that a cache made by ``kvpass::pack`` really holds."""
    x = torch.zeros(batch, shape.kv_heads, tokens, shape.head_dim, dtype=dtype)
    return shape.layers * sum(
        PackedKV(torch.ops.kvpass.pack(x, str(p)), p, tokens, dtype).nbytes
        for p in (plan.keys, plan.values)
    )


def bench_memory(
    shape: CacheShape,
    recipes: list[str],
    budget: int,
    batch: int,
    context: int,
    dtype: torch.dtype,
) -> list[Fit]:
    """The largest context and the largest batch that fit ``budget`` bytes, plain and per recipe.

    Args:
        shape: of the model's cache.
        recipes: names of recipes.
        budget: bytes for the cache alone.
        batch: sequences, for the largest context.
        context: tokens, for the largest batch.
        dtype: of the plain cache and of exact windows.

    Raises:
        OptionError: if a recipe is not known or a number is not positive.
        PlanError: if a recipe does not fit the head dimension.
    """
    for name, value in (("budget", budget), ("batch", batch), ("context", context)):
        if value < 1:
            raise OptionError(f"{name}={value} is not supported; at least 1.")
    plans: dict[str, LayerPlan | None] = {"plain": None}
    for name in recipes:
        plans[name] = recipe_of(name).layer_plan("*", shape.head_dim, shape.head_dim)
    return [_fit(name, plan, shape, budget, batch, context, dtype) for name, plan in plans.items()]


def _fit(
    name: str,
    plan: LayerPlan | None,
    shape: CacheShape,
    budget: int,
    batch: int,
    context: int,
    dtype: torch.dtype,
) -> Fit:
    def used(rows: int, tokens: int) -> int:
        return cache_bytes(plan, shape, rows, tokens, dtype.itemsize)

    return Fit(
        name,
        context=_largest(lambda tokens: used(batch, tokens), budget),
        batch=_largest(lambda rows: used(rows, context), budget),
        error=0 if plan is None else _arithmetic_error(plan, shape, dtype),
    )


def _arithmetic_error(plan: LayerPlan, shape: CacheShape, dtype: torch.dtype) -> int:
    """Largest difference in bytes between the arithmetic and one layer of a real cache."""
    layer = CacheShape(1, shape.kv_heads, shape.head_dim)
    return max(
        abs(
            cache_bytes(plan, layer, batch, tokens, dtype.itemsize)
            - held_bytes(plan, layer, batch, tokens, dtype)
        )
        for batch in (1, 2)
        for tokens in CHECKED_TOKENS
    )


def _largest(used: Callable[[int], int], budget: int) -> int:
    """The largest n with ``used(n) <= budget``; 0 if there is none. ``used`` never falls."""
    high = 1
    while used(high) <= budget:
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if used(middle) <= budget else (low, middle)
    return low


def memory_section(fits: list[Fit], title: str) -> Section:
    """The table, relative to the plain cache."""
    plain, rows = fits[0], []
    for fit in fits:
        if fit.error:
            rows.append([fit.name, f"WRONG: a real cache differs by {fit.error} bytes"])
            continue
        contexts = f"{fit.context:,}", _ratio(fit.context, plain.context)
        rows.append([fit.name, *contexts, f"{fit.batch:,}", _ratio(fit.batch, plain.batch)])
    note = "Right after a prompt; generating may hold a quarter more, as room to grow."
    return Section(title, ["cache", "largest context", "x", "largest batch", "x"], rows, [note])


def _ratio(value: int, base: int) -> str:
    return f"{value / base:.2f}" if base else "-"
