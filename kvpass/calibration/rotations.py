"""Rotations that are made for what a layer stores (OSCAR, arXiv 2605.17757)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.calibration.samples import AttentionSample, Stored
from kvpass.format.channels import ChannelRotation
from kvpass.format.hadamard import hadamard
from kvpass.plan import LayerPlan


class RotationSearch:
    """Second moments of what one layer stores, by KV head, and the rotations that they lead to.

    ``R = U H``: the eigenvectors ``U`` of the moments, those with the largest eigenvalue first,
    then a Hadamard matrix ``H`` whose rows are in the order of their changes of sign. So each
    channel has the same share of every eigenvalue, and the first axes, among them the mean, are
    constant within groups of consecutive channels, where the group's minimum holds them. OSCAR's
    ``H P``, with ``P`` the reversal of bits, has the same first rows.

    The moments of values are OSCAR's, ``V^T diag(w) V``: each token counts by the energy of its
    products with all queries, ``w_t = k_t^T (Q^T Q) k_t``. Those of keys are their own, ``K^T K``,
    where OSCAR takes the queries', ``Q^T Q``: errors of codes are alike in all directions, and so
    only the ranges of groups depend on the rotation, which are the keys'.

    Args:
        plan: the layer's, without bases.
    """

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self._keys = self._values = torch.zeros(())

    def add(self, sample: AttentionSample) -> None:
        """Adds one batch, without its sinks."""
        # Values have as many: no kernel takes others.
        sinks = self.plan.keys.sinks
        keys, values = (x[:, :, sinks:].double() for x in (sample.keys, sample.values))
        self._keys = self._keys + _moments(keys, torch.ones_like(keys[..., 0])).cpu()
        q = sample.rows(sample.q).double()
        energies = ((keys @ (q.transpose(2, 3) @ q)) * keys).sum(3)
        self._values = self._values + _moments(values, energies).cpu()

    def rotation(self, kind: Stored) -> ChannelRotation:
        """The rotation of the ``keys`` or the ``values``."""
        return eigen_rotation(self._keys if kind == "keys" else self._values)


def eigen_rotation(moments: Tensor) -> ChannelRotation:
    """The eigenvectors of ``moments``, symmetric ``[H, D, D]``, with a Hadamard matrix behind."""
    vectors = torch.linalg.eigh(moments.double()).eigenvectors.flip(2)
    # Libraries return either of an eigenvector's two signs.
    largest = vectors.abs().argmax(dim=1, keepdim=True)
    vectors = vectors * vectors.gather(1, largest).sign()
    return ChannelRotation.of(vectors @ hadamard(moments.shape[1]))


def _moments(x: Tensor, weights: Tensor) -> Tensor:
    """Second moments ``[H, D, D]``, sums over batch and tokens of ``x`` ``[B, H, T, D]``, each of
    which has its weight ``[B, H, T]``."""
    return ((x * weights.unsqueeze(3)).transpose(2, 3) @ x).sum(0)
