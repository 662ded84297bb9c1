"""How much a layer's rounding may cost the model: KVQuant's sensitivity, KVmix's importance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpass.calibration.data import token_batches
from kvpass.calibration.importance import Norms, means
from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import STORED, CalibrationRunner, Exact, GradientSample, Stored
from kvpass.format.quantize import fake_quantize
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan


@dataclass
class LayerScore:
    """Of one layer: how much rounding its keys, or its values, harms the model."""

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
        data, tokenizer, samples, length, batch, progress: as `kvpass.calibrate`.

    Returns:
        By the attention module's path: sums of ``(gradient * (x - rounded x))^2`` over channels,
        means over tokens.

    Raises:
        OptionError: if an argument is not allowed.
        PlanError: if the plan does not fit the model.
        UnmatchedGraphError: if no attention is found in the model.
    """
    run = ModelRunner(model, token_batches(data, tokenizer, samples, length, batch), progress)
    found: dict[str, LayerScore] = {}
    for (layer, kind), (cost,) in weighted_errors(run, [plan]).items():
        setattr(found.setdefault(layer, LayerScore()), kind, cost)
    return found


def weighted_errors(
    run: CalibrationRunner, plans: Sequence[Plan]
) -> dict[tuple[str, Stored], list[float]]:
    """For each plan, of the keys and the values of every layer: sums of squared errors times
    squared gradients, means over tokens. Gradients leave out what the plans' exact tokens tell."""
    found: dict[tuple[str, Stored], list[float]] = {}
    exact = exact_tokens([layer for plan in plans for layer in plan.layers.values()])
    tokens = run.tokens()

    def look(seen: GradientSample) -> None:
        for i, plan in enumerate(plans):
            layer = plan.layer(seen.layer)
            if seen.kind != ("keys" if layer.before_rope else "before_rope"):
                kind: Stored = "values" if seen.kind == "values" else "keys"
                errors = (seen.x.float() - rounded(layer, kind, seen.x)) * seen.gradient.float()
                costs = found.setdefault((seen.layer, kind), [0.0] * len(plans))
                costs[i] += float(errors.square().sum()) / tokens

    run.gradients(look, "sensitivities", exact)
    return found


def exact_tokens(layers: Sequence[LayerPlan]) -> Exact:
    """Of all these layers' keys, and values, so many last tokens are exact, on average over the
    steps of a generation."""

    def exact(plan: TensorPlan) -> int:
        return plan.retention.window + plan.retention.pack_every // 2

    packed = [x for x in layers if not (x.keys.codec.identity or x.values.codec.identity)]
    keys, values = ([exact(getattr(x, kind)) for x in packed] for kind in STORED)
    return min(keys, default=0), min(values, default=0)


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
        data, tokenizer, samples, length, progress: as `kvpass.calibrate`.

    Returns:
        By the attention module's path: L2 norms of the gradient of a text's mean loss, means over
        texts.

    Raises:
        OptionError: if an argument is not allowed.
        UnmatchedGraphError: if no attention is found in the model.
    """
    return by_layer(importance_of_texts(model, data, tokenizer, samples, length, progress))


def importance_of_texts(
    model: Any, data: Iterable[Any], tokenizer: Any, samples: int, length: int, progress: bool
) -> Norms:
    """As `importance`, for every text."""
    run = ModelRunner(model, token_batches(data, tokenizer, samples, length, 1), progress)
    return run.importance("importance")


def by_layer(norms: Norms) -> dict[str, LayerScore]:
    """Means over texts."""
    found: dict[str, LayerScore] = {}
    for (layer, kind), mean in means(norms).items():
        setattr(found.setdefault(layer, LayerScore()), kind, mean)
    return found


def rounded(layer: LayerPlan, kind: Stored, x: Tensor) -> Tensor:
    """What the keys, or values, ``x`` ``[B, H, T, D]`` of whole texts decode to, in float32: sinks
    are exact, whole groups of other tokens rounded."""
    x, values = x.float(), kind == "values"
    plan = layer.values if values else layer.keys
    plan.one_codec()
    order = layer.value_order if values else layer.key_order
    count = max(0, x.shape[2] - plan.sinks) // plan.codec.token_group * plan.codec.token_group
    if plan.codec.identity or not count:
        return x
    packed = x[:, :, plan.sinks : plan.sinks + count]
    ranges = None if values or layer.key_ranges is None else layer.key_ranges.tensor(x.device)
    found = fake_quantize(plan.codec, packed if order is None else order.store(packed), ranges)
    out = x.clone()
    out[:, :, plan.sinks : plan.sinks + count] = found if order is None else order.restore(found)
    return out
