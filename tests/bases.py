"""Random bases of channels for the tests' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass import ChannelOrder, ChannelRotation, LayerPlan, Plan, TensorPlan

# Channels that are rotated, of 16; and families whose pairs are neighbours.
ROTATED = {"phi": 8, "glm4": 8, "gpt_neox": 8, "opt": 0, "gpt2": 0}
NEIGHBOURS = ("glm4", "cohere")
PLAIN = TensorPlan()


def free(heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """Any order of each head's channels, ``[heads, dim]``."""
    return torch.stack([torch.randperm(dim, generator=generator) for _ in range(heads)])


def paired(
    heads: int, dim: int, generator: torch.Generator, rotated: int, neighbours: bool = False
) -> Tensor:
    """Orders that keep the pairs of the first ``rotated`` channels; the others are free."""
    pairs = free(heads, rotated // 2, generator) if rotated else torch.empty(heads, 0).long()
    if neighbours:
        order = torch.stack([2 * pairs, 2 * pairs + 1], dim=2).flatten(1)
    else:
        order = torch.cat([pairs, pairs + rotated // 2], dim=1)
    if rotated == dim:
        return order
    return torch.cat([order, rotated + free(heads, dim - rotated, generator)], dim=1)


def heads_and_dim(config: Any) -> tuple[int, int]:
    """KV heads, and channels of each."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, dim


def layer_plan(
    model: Any, keys: TensorPlan = PLAIN, values: TensorPlan = PLAIN, seed: int = 0
) -> LayerPlan:
    """Orders for one layer of a model of `tests.models`; those of the keys can be folded."""
    generator = torch.Generator().manual_seed(seed)
    family, (heads, dim) = model.config.model_type, heads_and_dim(model.config)
    rotated = ROTATED.get(family, dim)
    key_basis = paired(heads, dim, generator, rotated, family in NEIGHBOURS)
    orders = (ChannelOrder.of(x) for x in (key_basis, free(heads, dim, generator)))
    return LayerPlan(keys, values, *orders)


def plan(model: Any, keys: TensorPlan = PLAIN, values: TensorPlan = PLAIN) -> Plan:
    """Each layer has orders of its own."""
    layers = range(model.config.num_hidden_layers)
    return Plan(layers={str(i): layer_plan(model, keys, values, seed=i) for i in layers})


def orthogonal(heads: int, dim: int, generator: torch.Generator) -> Tensor:
    """Any rotation of each head's channels, ``[heads, dim, dim]``."""
    return torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator))[0]


def rotation(heads: int, dim: int, generator: torch.Generator) -> ChannelRotation:
    """`orthogonal`, for a plan."""
    return ChannelRotation.of(orthogonal(heads, dim, generator))


def rotated_plan(model: Any, keys: TensorPlan = PLAIN, values: TensorPlan = PLAIN) -> Plan:
    """Each layer has rotations of its own."""

    def layer(seed: int) -> LayerPlan:
        generator = torch.Generator().manual_seed(seed)
        shape = heads_and_dim(model.config)
        found = (rotation(*shape, generator) for _ in range(2))
        return LayerPlan(keys, values, *found)

    return Plan(layers={str(i): layer(i) for i in range(model.config.num_hidden_layers)})
