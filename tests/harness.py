"""Running models step by step, and counting what Dynamo compiled and what was allocated."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import kvpass
import kvpass.backend
from tests.models import prompt


def compiled(model: Any, recipe: Any, inner: str = "eager", **options: Any) -> Any:
    """A copy of ``model`` that runs through kvpass."""
    twin = copy.deepcopy(model)
    twin.compile(backend="kvpass", options={"recipe": recipe, "inner": inner, **options})
    return twin


def run_steps(
    model: Any, ids: Tensor, lengths: Sequence[int], mask: Tensor | None = None, cache: Any = None
) -> tuple[Tensor, Any]:
    """Logits ``[B, T, V]`` of ``ids`` fed in steps of these lengths, and the cache."""
    logits, position = [], 0
    with torch.no_grad():
        for n in lengths:
            end = position + n
            out = model(
                ids[:, position:end],
                attention_mask=None if mask is None else mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
            cache, position = out.past_key_values, end
    return torch.cat(logits, dim=1), cache


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled since its last reset."""
    return int(counters["stats"]["unique_graphs"])


def left_padding(lengths: Sequence[int], total: int) -> Tensor:
    """Attention mask ``[B, total]`` of sequences that end together."""
    mask = torch.ones(len(lengths), total, dtype=torch.long)
    for row, pad in enumerate(lengths):
        mask[row, :pad] = 0
    return mask


def batch_text(total: int, padded: bool, seed: int = 0) -> tuple[Tensor, Tensor | None, Tensor]:
    """Token ids ``[B, total]``: of one sequence, or of three with padding on the left; their
    padding mask, or None; and which positions are no padding, bool ``[B, total]``."""
    ids = prompt(3 if padded else 1, total, seed=seed)
    mask = left_padding([20, 3, 0], total) if padded else None
    return ids, mask, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def oracle(model: Any, recipe: kvpass.Recipe) -> Any:
    """The oracle's cache for ``model``."""
    return kvpass.oracle_cache(recipe.plan(model.config), model.config)


def error_to_oracle(twin: Any, model: Any, plan: Any, ids: Tensor, steps: Sequence[int]) -> float:
    """The largest difference between the logits of ``twin``, which is compiled, and those of
    ``model`` with the oracle of ``plan``."""
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, steps, None, kvpass.oracle_cache(plan, model.config, model))
    got, _ = run_steps(twin, ids, steps)
    return float((got - wanted).abs().max())


def peak(function: Any) -> int:
    """The most bytes that were allocated at once during a call, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = function()
    now = highest = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    del kept
    return highest
