"""``kvpass::linear``: a linear layer of so few tokens that it is bound by reading the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.ops.library import define

SCHEMA = "linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None) -> Tensor"


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


define(SCHEMA, linear, linear_fake)
