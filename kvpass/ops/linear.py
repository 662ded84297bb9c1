"""``kvpass::linear``: a linear layer of so few tokens that it is bound by reading the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.ops.library import define

SCHEMA = "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference of ``kvpass::linear``.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, of the dtype of ``x``.
        bias: ``[N]``, likewise.

    Returns:
        ``[..., N]``: ``x @ weight.T + bias``.
    """
    return torch.nn.functional.linear(x, weight, bias)


def linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape of `linear`."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


define(SCHEMA, linear, linear_fake)
