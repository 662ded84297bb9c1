"""Rotations that are made for what a layer stores (OSCAR, arXiv 2605.17757)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpass.calibration.samples import AttentionSample
from kvpass.format.channels import ChannelRotation
from kvpass.format.hadamard import hadamard
from kvpass.plan import LayerPlan


class RotationSearch:
    """Second moments of what one layer stores, by KV head, and the rotations that they lead to.

    ``x @ U @ H``: the eigenvectors ``U`` of the moments, those with the largest eigenvalue first,
    then a Hadamard matrix ``H`` whose rows are in the order of their changes of sign. So every
    channel has the same share of each eigenvalue, and the first axes, among them the mean, are
    nearly constant within groups of consecutive channels: the group's minimum holds them. OSCAR's
    ``H P`` is that of powers of two, ``P`` being the reversal of bits.

    Args:
        plan: the layer's, without bases.
    """

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self._keys = self._values = torch.zeros(())

    def add(self, sample: AttentionSample) -> None:
        """Adds one batch, without its sinks."""
        keys, values = (
            x[:, :, plan.sinks :].double()
            for x, plan in ((sample.keys, self.plan.keys), (sample.values, self.plan.values))
        )
        self._keys = self._keys + _moments(keys).cpu()
        self._values = self._values + _moments(values).cpu()

    def rotated(self) -> LayerPlan:
        """The layer's plan with these rotations."""
        keys, values = (eigen_rotation(x) for x in (self._keys, self._values))
        return replace(self.plan, key_basis=keys, value_basis=values)


def eigen_rotation(moments: Tensor) -> ChannelRotation:
    """The eigenvectors of ``moments``, symmetric ``[H, D, D]``, with a Hadamard matrix behind."""
    vectors = torch.linalg.eigh(moments.double()).eigenvectors.flip(2)
    # Libraries return either of an eigenvector's two signs.
    largest = vectors.abs().argmax(dim=1, keepdim=True)
    vectors = vectors * vectors.gather(1, largest).sign()
    return ChannelRotation.of(vectors @ hadamard(moments.shape[1]))


def _moments(x: Tensor) -> Tensor:
    """Second moments ``[H, D, D]``, sums over batch and tokens of ``x`` ``[B, H, T, D]``."""
    return torch.einsum("bhtd,bhte->hde", x, x)
