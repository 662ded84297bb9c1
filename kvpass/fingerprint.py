"""Samples of a model's weights, by which a calibrated plan knows the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Graph

from kvpass._torch import is_subclass, is_traced, local_shard, shard_offset, source_name
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
                found[f"{layer}.{name}"] = tuple(x for x in values if x is not None)
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
            if any(b is not None and abs(a - b) > allowed for a, b in pairs):
                raise PlanError(
                    f"The plan is calibrated for another model: the weight '{name}' of this one "
                    "has other values. Use kvpass.calibrate on this model."
                )


def _sampled(weight: Tensor) -> tuple[float | None, ...] | None:
    """Values at even distances, None for those that other processes hold; None if it is no plain
    tensor of floating numbers."""
    own = local_shard(weight)
    if is_subclass(own) or not weight.is_floating_point() or not weight.numel():
        return None
    positions = [i * (weight.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    if own is weight:
        return tuple(weight.detach().flatten()[positions].float().tolist())
    return tuple(_held(weight, own, position) for position in positions)


def _held(weight: Tensor, own: Tensor, position: int) -> float | None:
    """The value at ``position`` of a ``DTensor``, if it lies in its part ``own``."""
    whole = np.unravel_index(position, tuple(weight.shape))
    index = tuple(int(i) - start for i, start in zip(whole, shard_offset(weight), strict=True))
    inside = all(0 <= i < size for i, size in zip(index, own.shape, strict=True))
    return float(own.detach()[index]) if inside else None
