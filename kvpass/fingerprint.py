"""Samples of a model's weights, by which a calibrated plan knows the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph

from kvpass._torch import is_subclass, is_traced, source_name
from kvpass.errors import PlanError

# How many values of a weight are compared.
_SAMPLES = 4
# A model may have another precision: bfloat16 keeps 8 bits, and its rounding may add up.
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
        if name not in known or not isinstance(example, Tensor) or is_traced(example):
            continue
        # None: it has been quantized since, for example.
        if (found := _sampled(example)) is not None:
            allowed = _TOLERANCE * max(map(abs, known[name]))
            pairs = zip(known[name], found, strict=True)
            if any(abs(a - b) > allowed for a, b in pairs):
                raise PlanError(
                    f"The plan is calibrated for another model: the weight '{name}' of this one "
                    "has other values. Use kvpass.calibrate on this model."
                )


def _sampled(weight: Tensor) -> tuple[float, ...] | None:
    """Values at even distances; None if it is no plain tensor of floating numbers."""
    if is_subclass(weight) or not weight.is_floating_point() or not weight.numel():
        return None
    positions = [i * (weight.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return tuple(weight.detach().flatten()[positions].float().tolist())
