"""``kvpass::linear`` and ``kvpass::linears``: linear layers of so few tokens that they are bound by
reading their weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvpass.ops.library import define

SCHEMA = "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None) -> Tensor"
LINEARS_SCHEMA = (
    "linears(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] scales) -> Tensor[]"
)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Reference of ``kvpass::linear``.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of the dtype of ``x``, or int8 with a ``scale``.
        bias: ``[N]``, of the dtype of ``x``.
        scale: float32 ``[N, 1]``, of each row of the weight.

    Returns:
        ``[..., N]``: ``x @ weight.T * scale.T + bias``.
    """
    if scale is None:
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.nn.functional.linear(x, weight.to(x.dtype)) * scale.to(x.dtype).flatten()
    return out if bias is None else out + bias


def linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Shape of `linear`."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[Tensor]:
    """Reference of ``kvpass::linears``: `linear` of the same tokens for each weight, with its bias
    and scale."""
    return list(map(partial(linear, x), weights, biases, scales))


def linears_fake(x: Tensor, weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    """Shapes of `linears`."""
    return [linear_fake(x, weight) for weight in weights]


define(SCHEMA, linear, linear_fake)
define(LINEARS_SCHEMA, linears, linears_fake)
