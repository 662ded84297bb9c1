"""What rounding a layer may cost the model: KVQuant's sensitivity, KVmix's importance, and scores
of several ways to store its keys, or its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass.calibration.data import token_batches
from kvpass.calibration.importance import means
from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
    Exact,
    GradientSample,
    Kind,
    Name,
    Numbers,
    Replacement,
    Shape,
    Stored,
)
from kvpass.format.quantize import fake_quantize
from kvpass.plan import LayerPlan, Plan

By = Literal["importance", "sensitivity", "loss"]


@dataclass
class LayerScore:
    """How much rounding a layer's keys, or its values, harms the model."""

    keys: float = 0.0
    values: float = 0.0


def sensitivities(
    model: Any,
    plan: Plan,
    data: Iterable[Any],
    *,
    tokenizer: Any = None,
    samples: int = 64,
    length: int = 1024,
    batch: int = 4,
    progress: bool = True,
) -> dict[str, LayerScore]:
    """The quantization error of every layer, weighted by the diagonal of the Fisher information
    (KVQuant, appendix P): the layers with the largest gain most from more bits.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        plan: how keys and values are rounded.
        data, tokenizer, samples, length, batch, progress: as `kvpass.calibrate`, which raises the
            same errors.

    Returns:
        For each attention module's path: sums of ``(gradient * (x - rounded x))^2`` over channels,
        means over tokens.
    """
    run = ModelRunner(model, token_batches(data, tokenizer, samples, length, batch), progress)
    return by_layer({name: cost for name, (cost,) in weighted_errors(run, [plan]).items()})


def weighted_errors(run: CalibrationRunner, plans: Sequence[Plan]) -> Numbers:
    """Sums of squared errors times squared gradients, means over tokens; for each plan, by layer
    and kind. Gradients do not count what is read of tokens that are exact in all plans."""
    found: Numbers = {}
    exact = exact_tokens([layer for plan in plans for layer in plan.layers.values()])
    tokens = run.tokens()

    def observe(sample: GradientSample) -> None:
        for i, plan in enumerate(plans):
            layer, kind = plan.layer(sample.layer), sample.stored
            if sample.kind != ("keys" if layer.before_rope else "before_rope"):
                rounding = sample.x.float() - rounded(layer, kind, sample.x)
                costs = found.setdefault((sample.layer, kind), [0.0] * len(plans))
                costs[i] += float((rounding * sample.gradient.float()).square().sum()) / tokens

    run.gradients(observe, "sensitivities", exact)
    return found


def exact_tokens(layers: Sequence[LayerPlan]) -> Exact:
    """How many last keys, and values, are exact in all these layers, on average over the steps of
    a generation."""
    packed = [x for x in layers if not (x.keys.codec.identity or x.values.codec.identity)]
    retentions = ([layer.stored(kind)[0].retention for layer in packed] for kind in STORED)
    keys, values = (min((r.window + r.pack_every // 2 for r in x), default=0) for x in retentions)
    return keys, values


def importance(
    model: Any,
    data: Iterable[Any],
    *,
    tokenizer: Any = None,
    samples: int = 64,
    length: int = 1024,
    progress: bool = True,
) -> dict[str, LayerScore]:
    """How much the loss depends on ``W_k`` and ``W_v`` of every layer, also where they are part of
    one projection (KVmix, section 3.1).

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        data, tokenizer, samples, length, progress: as `kvpass.calibrate`, which raises the same
            errors.

    Returns:
        For each attention module's path: L2 norms of the gradient of a text's mean loss, means
        over texts.
    """
    return by_layer(means(importance_of_texts(model, data, tokenizer, samples, length, progress)))


def importance_of_texts(
    model: Any, data: Iterable[Any], tokenizer: Any, samples: int, length: int, progress: bool
) -> Numbers:
    """As `importance`, each text on its own."""
    run = ModelRunner(model, token_batches(data, tokenizer, samples, length, 1), progress)
    return run.importance("importance")


def by_layer(scores: Mapping[Name, float]) -> dict[str, LayerScore]:
    """The scores of keys and values, side by side."""
    found: dict[str, LayerScore] = {}
    for (layer, kind), score in scores.items():
        setattr(found.setdefault(layer, LayerScore()), kind, score)
    return found


def rounded(layer: LayerPlan, kind: Stored, x: Tensor) -> Tensor:
    """What the keys, or values, ``x`` ``[B, H, T, D]`` of whole texts decode to, in float32: sinks
    are exact, whole groups of other tokens rounded."""
    plan, basis, ranges = layer.stored(kind)
    plan.one_codec()
    out = x.float().clone()
    count = max(0, x.shape[2] - plan.sinks) // plan.codec.token_group * plan.codec.token_group
    if count and not plan.codec.identity:
        packed = out[:, :, plan.sinks : plan.sinks + count]
        stored = packed if basis is None else basis.store(packed)
        qparams = None if ranges is None else ranges.tensor(x.device)
        found = fake_quantize(plan.codec, stored, qparams)
        packed.copy_(found if basis is None else basis.restore(found))
    return out


@dataclass(frozen=True)
class TensorScore:
    """What candidates cost for the keys, or the values, of one layer.

    Attributes:
        heads, dim: KV heads, and channels of each.
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


def score_run(
    run: CalibrationRunner, shapes: Mapping[str, Shape], candidates: Sequence[Plan], by: By
) -> Scores:
    """See `kvpass.score`, with what runs the model, and the shapes of its layers."""
    for layer, (_, *dims) in shapes.items():
        for plan in candidates:
            plan.layer_plan(layer, *dims)
    if by == "loss":
        costs = _losses(run, candidates, list(shapes))
    elif by == "sensitivity":
        costs = weighted_errors(run, candidates)
    else:
        importance = means(run.importance("importance"))
        costs = {
            name: [importance[name] * error for error in errors]
            for name, errors in _relative_errors(run, candidates).items()
        }
    tensors: dict[Name, TensorScore] = {}
    for layer, (heads, *dims) in shapes.items():
        for kind, dim in zip(STORED, dims, strict=True):
            codecs = [plan.layer(layer).stored(kind)[0].codec for plan in candidates]
            bits = tuple(codec.bits_per_element(dim, heads) for codec in codecs)
            tensors[layer, kind] = TensorScore(heads, dim, tuple(costs[layer, kind]), bits)
    return Scores(by, tuple(candidates), tensors)


def _relative_errors(run: CalibrationRunner, candidates: Sequence[Plan]) -> Numbers:
    """Norms of rounding errors over those of what is rounded."""
    # Sums of squares: of the errors, and of what is rounded; by candidate.
    squares: dict[Name, Tensor] = {}
    zeros = torch.zeros(2, len(candidates), dtype=torch.float64)

    def observe(sample: AttentionSample) -> None:
        for kind in STORED:
            found = squares.setdefault((sample.layer, kind), zeros.clone())
            for i, plan in enumerate(candidates):
                layer = plan.layer(sample.layer)
                x = sample.stored(kind, layer.before_rope).float()
                found[0, i] += float((x - rounded(layer, kind, x)).square().sum())
                found[1, i] += float(x.square().sum())

    run(observe, "rounding errors")
    return {
        name: (errors / exact.clamp(min=1e-30)).sqrt().tolist()
        for name, (errors, exact) in squares.items()
    }


def _losses(run: CalibrationRunner, candidates: Sequence[Plan], layers: Sequence[str]) -> Numbers:
    """How much more the loss is with one tensor rounded."""
    plain = run.loss(None, "loss")

    def increase(path: str, kind: Stored, plan: Plan) -> float:
        layer = plan.layer(path)
        if layer.stored(kind)[0].codec.identity:
            # A pass whose tensors lie elsewhere in memory may round its sums otherwise.
            return 0.0
        replaced: Kind = "before_rope" if kind == "keys" and layer.before_rope else kind
        rounds = partial(rounded, layer, kind)
        replacement = Replacement(path, replaced, rounds, exact_tokens([layer]))
        return run.loss(replacement, f"{path} {kind}") - plain

    return {
        (path, kind): [increase(path, kind, plan) for plan in candidates]
        for path in layers
        for kind in STORED
    }
