"""Runs one family in one mode through kvpass, and compares it with the plain model."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import graph_counts
from kvpass.calibration.samples import STORED
from kvpass.errors import cut
from kvpass.format.tensor_plan import TensorPlan
from kvpass.inspect.explain import explain
from kvpass.inspect.report import GraphReport
from kvpass.oracle import OracleLayer, oracle_cache
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import RECIPES, Recipe, recipe, written_fields
from kvpass.tensor.dispatch import DECODES
from kvpass.tensor.packed import PackedKV
from kvpass.zoo.families import tiny_model
from kvpass.zoo.outcome import Mode, Outcome
from kvpass.zoo.steps import Text, new_cache, random_text, run_steps

# Small enough for keys to be packed while decoding.
_SMALL = {"group": 16, "residual": 16}
_UPDATES = ("quantize_cache", "quantize_static")

# Of logits, relative to the largest one of the plain model: the same values through other kernels
# in float32, with sums in another order. It is 3e-6 at most over all families.
TOLERANCE = 1e-4
# From the second layer on, rounding in float32 can move a number across the border between two
# codes, or that of a group's scale: up to a group of tokens is then off by a step, and the logits
# by this much at most. It depends on the weights: it happens in one family of a hundred, and does
# not come back with two other sets of weights.
TOLERANCE_FLIP = 1e-2


@dataclass(frozen=True)
class _Subject:
    """A model and what it answers without kvpass: logits ``[B, T, V]``, and its cache."""

    model: Any
    text: Text
    plain: Tensor
    cache: Any


def run_mode(
    family: str, mode: Mode, recipes: Sequence[str], inner: str = "eager"
) -> Iterator[Outcome]:
    """One outcome per recipe, of a family of `kvpass.zoo.families.family_names`. Never raises.
    ``inner`` compiles the rewritten graphs: ``eager`` or ``inductor``."""
    # What warnings say is in the outcome.
    with warnings.catch_warnings(action="ignore"):
        try:
            subject = _subject(family, mode)
        except Exception as error:
            lacking = "does not support an attention implementation" in str(error)
            status = "no such attention" if lacking else "plain fails"
            for name in recipes:
                yield Outcome(family, mode, name, status, problem=problem_of(error))
            return
        for name in recipes:
            try:
                outcome = _compiled(family, mode, name, subject, inner)
                if outcome.status == "wrong" and outcome.error <= TOLERANCE_FLIP:
                    outcome = _without_flips(outcome, inner)
            except Exception as error:
                outcome = Outcome(family, mode, name, "crash", problem=problem_of(error))
            yield outcome


def _subject(family: str, mode: Mode, seed: int = 0) -> _Subject:
    model, text = tiny_model(family, mode.attention, seed), random_text(mode)
    plain, cache = run_steps(model, text, new_cache(mode, model.config))
    if not plain.isfinite().all():
        raise ValueError("its logits are not finite")
    return _Subject(model, text, plain, cache)


def _without_flips(outcome: Outcome, inner: str) -> Outcome:
    """The outcome, right after all if two other sets of weights are, see `TOLERANCE_FLIP`."""
    family, mode, name = outcome.family, outcome.mode, outcome.recipe
    for seed in (1, 2):
        other = _compiled(family, mode, name, _subject(family, mode, seed), inner)
        if other.status != "ok":
            return outcome
    return replace(outcome, status="ok", problem=f"a code flipped: {outcome.problem}")


def _compiled(family: str, mode: Mode, name: str, subject: _Subject, inner: str) -> Outcome:
    """Runs the compiled model."""
    torch.compiler.reset()
    outcome = Outcome(family, mode, name, "ok", tensors=len(_tensors(subject.cache)))
    twin = copy.deepcopy(subject.model)
    twin.compile(backend="kvpass", options={"recipe": small_recipe(name), "inner": inner})
    counts, outside, start = graph_counts(), DECODES.total(), time.perf_counter()
    try:
        got, cache = run_steps(twin, subject.text, new_cache(mode, twin.config))
    except Exception as error:
        without = _compiler_problem(subject, mode)
        status = "compile fails" if without else "crash"
        return replace(outcome, status=status, problem=without or problem_of(error))
    seconds = time.perf_counter() - start
    graphs, breaks = (b - a for a, b in zip(counts, graph_counts(), strict=True))
    packed = [t for t in _tensors(cache) if isinstance(t, PackedKV)]
    outcome = replace(
        outcome, packed=len(packed), graphs=graphs, breaks=breaks, seconds=seconds,
        outside=DECODES.total() - outside, **_sites(explain(twin).graphs, len(packed)),
    )  # fmt: skip
    wanted = subject.plain
    lossy = any(not t.plan.codec.identity for t in packed)
    if lossy:
        reference = reference_cache(cache, type(subject.cache), subject.model.config)
        if isinstance(reference, str):
            return replace(outcome, status="unchecked", problem=reference)
        wanted, _ = run_steps(subject.model, subject.text, reference)
    off, effect = (_relative(x, wanted, subject) for x in (got, subject.plain))
    outcome = replace(outcome, error=off, effect=effect, tolerance=TOLERANCE)
    if off <= TOLERANCE:
        return outcome
    if lossy and (changed := _change_by_cache(subject)):
        return replace(outcome, status="unchecked", problem=changed)
    if without := _compiler_problem(subject, mode):
        return replace(outcome, status="compile fails", problem=without)
    problem = f"relative error {off:.1e}, allowed {TOLERANCE:.0e}"
    return replace(outcome, status="wrong", problem=problem)


def _relative(got: Tensor, wanted: Tensor, subject: _Subject) -> float:
    """The largest difference where there is no padding, relative to the largest plain logit."""
    visible = subject.text.visible
    difference = (got - wanted)[visible].abs().max() / subject.plain[visible].abs().max()
    return float(difference.nan_to_num(nan=torch.inf))


def _change_by_cache(subject: _Subject) -> str | None:
    """Why the oracle, which is a dynamic cache, does not fit the subject's kind of cache."""
    other, _ = run_steps(subject.model, subject.text, None)
    changed = _relative(other, subject.plain, subject)
    if changed <= TOLERANCE:
        return None
    kind = type(subject.cache).__name__
    return f"without kvpass a {kind} changes what the model answers by {changed:.1e}"


def _compiler_problem(subject: _Subject, mode: Mode) -> str | None:
    """The mistake of ``torch.compile`` on this model without kvpass; None if there is none."""
    torch.compiler.reset()
    twin = copy.deepcopy(subject.model)
    twin.compile(backend="eager")
    try:
        got, _ = run_steps(twin, subject.text, new_cache(mode, twin.config))
    except Exception as error:
        return problem_of(error)
    changed = _relative(got, subject.plain, subject)
    return None if changed <= TOLERANCE else f"relative error {changed:.1e} without kvpass"


def reference_cache(cache: Any, cache_type: type, config: Any) -> Any:
    """A plain cache that rounds the layers that ``cache`` holds packed, or why there is none."""
    if cache_type not in (DynamicCache, StaticCache, EncoderDecoderCache):
        return f"there is no oracle for {cache_type.__name__}"
    plans = [_layer_plan(layer) for layer in _layers(cache)]
    reference = oracle_cache(Plan(layers={str(i): p for i, p in enumerate(plans)}), config)
    if len(plans) != len(reference.layers):
        return f"the oracle has {len(reference.layers)} layers, the cache {len(plans)}"
    for plan, layer in zip(plans, reference.layers, strict=True):
        if plan != LayerPlan() and not isinstance(layer, OracleLayer):
            return f"there is no oracle for {type(layer).__name__}"
    if cache_type is EncoderDecoderCache:
        return EncoderDecoderCache(reference, DynamicCache(config=config))
    return reference


def _layer_plan(layer: Any) -> LayerPlan:
    """How the layer is held, without what the kind of its cache adds to the recipe's plan."""
    held = [getattr(layer, name, None) for name in STORED]
    packed = [x if isinstance(x, PackedKV) else None for x in held]
    keys, values = (
        TensorPlan() if x is None else TensorPlan(x.plan.codec, x.plan.retention) for x in packed
    )
    key_basis, value_basis = (None if x is None else x.basis for x in packed)
    return LayerPlan(keys, values, key_basis, value_basis)


def problem_of(error: BaseException) -> str:
    """An error in a line of bounded length."""
    return cut(f"{type(error).__name__}: {error}", 300)


def small_recipe(text: str) -> Recipe:
    """The recipe of a command line, so small where it does not say otherwise that short texts are
    packed."""
    name, overrides = written_fields(text)
    names = {f.name for f in fields(RECIPES[name]())} if name in RECIPES else set()
    return recipe(name, **{k: v for k, v in _SMALL.items() if k in names} | overrides)


def _layers(cache: Any) -> Sequence[Any]:
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", ())


def _tensors(cache: Any) -> list[Tensor]:
    """Keys and values of all layers."""
    found = (getattr(x, name, None) for x in _layers(cache) for name in STORED)
    return [t for t in found if isinstance(t, Tensor)]


def _sites(reports: Sequence[GraphReport], packed: int) -> dict[str, Any]:
    """Fused and decoded cache tensors, and reasons of refusals, by module over all graphs."""
    updates: dict[str, int] = {}
    fused, refused = set(), set()
    for report in reports:
        fired = Counter(e.path for e in report.events if e.fired and e.rule in _UPDATES)
        updates = {p: max(fired[p], updates.get(p, 0)) for p in {*fired, *updates}}
        fused |= {e.path for e in report.events if e.fired and e.rule == "fuse_attention"}
        # Reasons without the names of nodes.
        refused |= {
            (e.path, f"{e.rule}: {re.sub(r' [(]at [^()]*[)]$', '', e.detail)}")
            for e in report.events
            if not e.fired
        }
    # Behind graph breaks several modules have one path.
    decoded = sum(n for p, n in updates.items() if p not in fused) if fused else packed
    decoded = min(decoded, packed)
    return {
        "fused": packed - decoded,
        "decoded": decoded,
        "refused": dict(Counter(why for _, why in refused)),
    }
