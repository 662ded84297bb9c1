"""`score`: what each way of storing the keys, or the values, of each layer is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from kvpass.calibration.data import token_batches
from kvpass.calibration.importance import means
from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
    Kind,
    Replacement,
    Stored,
    layer_dims,
    layer_shapes,
)
from kvpass.calibration.sensitivity import exact_tokens, rounded, weighted_errors
from kvpass.errors import OptionError, shown, unknown
from kvpass.plan import Plan

By = Literal["importance", "sensitivity", "loss"]
# The attention module's path, and which of its tensors.
Name = tuple[str, Stored]
# Of each tensor, for each candidate.
Costs = dict[Name, list[float]]


@dataclass(frozen=True)
class TensorScore:
    """Of the keys, or the values, of one layer.

    Attributes:
        heads, dim: of each token.
        costs: predicted for each candidate; in nats per token if scored by ``loss``.
        bits: per element that each candidate stores, its exact tokens not counted.
    """

    heads: int
    dim: int
    costs: tuple[float, ...]
    bits: tuple[float, ...]


@dataclass(frozen=True)
class Scores:
    """What `kvpass.allocate` chooses by.

    Attributes:
        by: how costs were found.
        candidates: plans, each of which says how every layer could be stored.
        tensors: by the attention module's path, and ``keys`` or ``values``.
    """

    by: By
    candidates: tuple[Plan, ...]
    tensors: Mapping[Name, TensorScore]


def score(
    model: Any,
    candidates: Sequence[Plan],
    data: Iterable[Any],
    *,
    by: By = "sensitivity",
    tokenizer: Any = None,
    samples: int = 64,
    length: int = 1024,
    batch: int = 4,
    progress: bool = True,
) -> Scores:
    """Scores candidates for the keys and the values of every layer.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        candidates: plans for this model.
        data, tokenizer, samples, length, batch, progress: as `kvpass.calibrate`.
        by: ``importance``: the gradient's norm with respect to the weights that make keys or values
            (KVmix, section 3.1) times the rounding error's relative size. ``sensitivity``: the
            rounding errors, weighted by squared gradients (KVQuant, appendix P). ``loss``: what the
            loss grows by when this tensor alone is rounded; one forward pass for each candidate
            and tensor.

    Raises:
        OptionError: if an argument is not allowed.
        PlanError: if a plan does not fit the model.
        UnmatchedGraphError: if no attention is found in the model.
    """
    if by not in get_args(By):
        raise OptionError(unknown("score", by, get_args(By)))
    if not candidates or not all(isinstance(plan, Plan) for plan in candidates):
        raise OptionError(
            f"candidates={shown(candidates)} are not supported; allowed: at least one "
            "kvpass.Plan, e.g. kvpass.recipe('kivi-2bit').plan(model.config)."
        )
    run = ModelRunner(model, token_batches(data, tokenizer, samples, length, batch), progress)
    return score_run(run, candidates, by)


def score_run(run: CalibrationRunner, candidates: Sequence[Plan], by: By) -> Scores:
    """As `score`, of a run."""
    shapes = layer_shapes(run)
    for layer, dims in layer_dims(shapes).items():
        for plan in candidates:
            plan.layer_plan(layer, *dims)
    if by == "loss":
        costs = _losses(run, candidates, shapes)
    elif by == "sensitivity":
        costs = weighted_errors(run, candidates)
    else:
        costs = _relative(run, candidates)
        importance = means(run.importance("importance"))
        costs = {name: [importance[name] * x for x in found] for name, found in costs.items()}
    tensors = {}
    for (layer, kind), (heads, dim) in shapes.items():
        plans = (plan.layer(layer) for plan in candidates)
        codecs = [(p.keys if kind == "keys" else p.values).codec for p in plans]
        bits = tuple(codec.bits_per_element(dim, heads) for codec in codecs)
        tensors[layer, kind] = TensorScore(heads, dim, tuple(costs[layer, kind]), bits)
    return Scores(by, tuple(candidates), tensors)


def _relative(run: CalibrationRunner, candidates: Sequence[Plan]) -> Costs:
    """Norms of rounding errors over those of what is rounded."""
    errors: Costs = {}
    norms: Costs = {}

    def look(seen: AttentionSample) -> None:
        for kind in STORED:
            name = (seen.layer, kind)
            known = errors.setdefault(name, [0.0] * len(candidates))
            sizes = norms.setdefault(name, [0.0] * len(candidates))
            for i, plan in enumerate(candidates):
                layer = plan.layer(seen.layer)
                x = seen.stored(kind, layer.before_rope).float()
                known[i] += float((x - rounded(layer, kind, x)).square().sum())
                sizes[i] += float(x.square().sum())

    run(look, "rounding errors")
    return {
        name: [(e / n) ** 0.5 if n else 0.0 for e, n in zip(known, norms[name], strict=True)]
        for name, known in errors.items()
    }


def _losses(
    run: CalibrationRunner, candidates: Sequence[Plan], shapes: Mapping[Name, Any]
) -> Costs:
    """Differences of the loss."""
    plain = run.loss(None, "loss")

    def loss(name: Name, plan: Plan) -> float:
        path, kind = name
        layer = plan.layer(path)
        if getattr(layer, kind).codec.identity:
            # A pass whose tensors lie elsewhere in memory may round its sums otherwise.
            return plain
        wanted: Kind = "before_rope" if kind == "keys" and layer.before_rope else kind
        rounds = partial(rounded, layer, kind)
        found = Replacement(path, wanted, rounds, exact_tokens([layer]))
        return run.loss(found, f"{path} {kind}")

    return {name: [loss(name, plan) - plain for plan in candidates] for name in shapes}
