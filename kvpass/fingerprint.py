"""By which weights a calibrated plan knows its model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph

from kvpass._torch import is_subclass, is_traced, source_name
from kvpass.errors import PlanError

# Values that are kept of a weight.
_SAMPLES = 4
# Between them and a model in another precision: bfloat16 keeps 8 bits, and its rounding may add up.
_TOLERANCE = 2.0**-6

# A module or parameter in where Dynamo read it from, e.g. L['self']._modules['lm_head'].
_PARTS = re.compile(r"\._(?:modules|parameters)\['([^']+)'\]")

Weights = Mapping[str, tuple[float, ...]]


def fingerprint(model: Any, layers: Iterable[str]) -> Weights:
    """Some values of every weight below the attention modules at the paths ``layers``."""
    found = {}
    for layer in layers:
        for name, weight in model.get_submodule(layer).named_parameters():
            if (values := _sampled(weight)) is not None:
                found[f"{layer}.{name}"] = values
    return found


def check_weights(graph: Graph, examples: Sequence[Any], known: Weights) -> None:
    """Compares the parameters of a graph with the weights of the same names that are ``known``.

    Raises:
        PlanError: if one has another value.
    """
    for node, example in zip(graph.find_nodes(op="placeholder"), examples, strict=True):
        name = ".".join(_PARTS.findall(source_name(node)))
        if name in known and isinstance(example, Tensor) and not is_traced(example):
            found = _sampled(example)
            # Quantized since, for example.
            if found is not None and _differ(known[name], found):
                raise PlanError(
                    f"The plan is calibrated for another model: the weight '{name}' of this one "
                    "has other values. Use kvpass.calibrate on this model."
                )


def _differ(expected: Sequence[float], found: Sequence[float]) -> bool:
    least = _TOLERANCE * max(map(abs, expected))
    pairs = zip(expected, found, strict=True)
    return any(abs(a - b) > least for a, b in pairs)


def _sampled(weight: Tensor) -> tuple[float, ...] | None:
    """Values at even distances; None if it is no plain tensor of such."""
    if is_subclass(weight) or not weight.is_floating_point() or not weight.numel():
        return None
    places = [i * (weight.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    values: list[float] = weight.detach().flatten()[places].float().tolist()
    return tuple(values)
