"""How much a layer's rounding costs the model: the score of KVQuant's appendix P."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvpass._torch import is_compiled
from kvpass.calibration.data import token_batches
from kvpass.calibration.observe import Watched
from kvpass.calibration.seen import SeenGradient
from kvpass.errors import OptionError
from kvpass.plan import LayerPlan, Plan


@dataclass
class Sensitivity:
    """Of one layer: errors weighted by what they change in the loss.

    Attributes:
        keys, values: sums of ``(gradient * (x - rounded x))^2`` over channels, means over tokens.
    """

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
) -> dict[str, Sensitivity]:
    """The quantization error of every layer, weighted by the diagonal of the Fisher information
    (KVQuant, appendix P): the layers with the largest gain most from more bits.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        plan: how keys and values are rounded.
        data, tokenizer, samples, length, batch, progress: as `kvpass.calibrate`.

    Returns:
        By the attention module's path.

    Raises:
        OptionError: if an argument is not allowed.
        PlanError: if the plan does not fit the model.
        UnmatchedGraphError: if no attention is found in the model.
    """
    if is_compiled(model):
        raise OptionError("The model is compiled already; use it before model.compile().")
    run = Watched(model, token_batches(data, tokenizer, samples, length, batch), progress)
    tokens, found = run.tokens(), dict[str, Sensitivity]()

    def look(seen: SeenGradient) -> None:
        layer = plan.layer(seen.layer)
        if seen.kind == ("keys" if layer.before_rope else "before_rope"):
            return
        errors = seen.x.float() - _rounded(layer, seen)
        score = float((errors * seen.gradient.float()).square().sum()) / tokens
        known = found.setdefault(seen.layer, Sensitivity())
        if seen.kind == "values":
            known.values += score
        else:
            known.keys += score

    run.gradients(look, "sensitivities")
    return found


def _rounded(layer: LayerPlan, seen: SeenGradient) -> Tensor:
    """What all tokens decode to, whole groups of them."""
    x, values = seen.x.float(), seen.kind == "values"
    codec = layer.values.codec if values else layer.keys.codec
    order = layer.value_order if values else layer.key_order
    if codec.identity:
        return x
    whole = x.shape[2] // codec.token_group * codec.token_group
    stored = x[:, :, :whole] if order is None else order.store(x[:, :, :whole])
    ranges = None if values or layer.key_ranges is None else layer.key_ranges.tensor(x.device)
    rounded = codec.rounded(stored, ranges)
    out = x.clone()
    out[:, :, :whole] = rounded if order is None else order.restore(rounded)
    return out
