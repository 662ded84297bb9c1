"""``kvpass bench memory``: what fits into a byte budget, by the shapes that ``kvpass::pack`` has on
the meta device, which real caches confirm."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import kvpass.ops.pack  # noqa: F401  (registers the op)
from kvpass.bench.models import CacheShape, check_sizes
from kvpass.bench.report import Section
from kvpass.errors import OptionError, shown
from kvpass.plan import LayerPlan
from kvpass.recipes import written_recipe
from kvpass.tensor.packed import PackedKV

# Lengths around packed runs, tiles and the smallest capacity, at which real caches are made.
CHECKED_TOKENS = (1, 128, 257, 700)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip
_META = torch.device("meta")


@dataclass(frozen=True)
class Fit:
    """The most tokens that fit at the given batch, and the most sequences at the given context.

    ``error``: how far bytes really held were from the computed ones; 0 unless these are wrong.
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


def cache_bytes(
    plan: LayerPlan | None,
    shape: CacheShape,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device = _META,
) -> int:
    """Bytes of a model's whole cache right after a prompt; ``plan`` None is the plain cache.

    While tokens are generated the packed segment grows by a quarter at a time, so up to that much
    more may be spare.
    """
    if plan is None:
        elements = batch * shape.kv_heads * tokens * shape.head_dim
        return shape.layers * 2 * elements * dtype.itemsize
    # On the meta device this costs neither time nor memory.
    x = torch.zeros(batch, shape.kv_heads, tokens, shape.head_dim, dtype=dtype, device=device)
    return shape.layers * sum(
        PackedKV(torch.ops.kvpass.pack(x, str(p)), p, tokens, dtype).nbytes
        for p in (plan.keys, plan.values)
    )


def bench_memory(
    shape: CacheShape, recipes: list[str], budget: int, batch: int, context: int, dtype: torch.dtype
) -> list[Fit]:
    """The largest context at ``batch`` and the largest batch at ``context`` whose caches fit
    ``budget`` bytes, plain and per recipe. ``dtype``: of the plain cache and of exact windows.

    Raises:
        OptionError: if a recipe is not known or a number is not positive.
        PlanError: if a recipe does not fit the head dimension.
    """
    check_sizes(budget=budget, batch=batch, context=context)
    plans: dict[str, LayerPlan | None] = {"plain": None}
    for name in recipes:
        plans[name] = written_recipe(name).layer_plan("*", shape.head_dim, shape.head_dim)

    def fit(name: str, plan: LayerPlan | None) -> Fit:
        return Fit(
            name,
            context=_largest(lambda n: cache_bytes(plan, shape, batch, n, dtype), budget),
            batch=_largest(lambda n: cache_bytes(plan, shape, n, context, dtype), budget),
            error=0 if plan is None else _error(plan, replace(shape, layers=1), dtype),
        )

    return [fit(name, plan) for name, plan in plans.items()]


def _error(plan: LayerPlan, layer: CacheShape, dtype: torch.dtype) -> int:
    """Largest difference in bytes between the computed and a real cache of a layer."""
    return max(
        abs(
            cache_bytes(plan, layer, batch, tokens, dtype)
            - cache_bytes(plan, layer, batch, tokens, dtype, torch.device("cpu"))
        )
        for batch in (1, 2)
        for tokens in CHECKED_TOKENS
    )


def _largest(used: Callable[[int], int], budget: int) -> int:
    """The largest n with ``used(n) <= budget``; 0 if there is none. ``used`` never falls."""
    high = 1
    while used(high) <= budget:
        high *= 2
    return bisect_right(range(1, high), budget, key=used)


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
