"""Codebooks by k-means, weighted by sensitivity (KVQuant, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.calibration.channels import k_means

# The range from -1 to 1 is cut into so many.
_BINS = 4096


class CodebookSamples:
    """Sums of normalised values in narrow bins, for the k-means of all of them.

    A bin counts as one value, its weighted mean: the codebook's values move by less than its width
    of 1/2048.
    """

    def __init__(self) -> None:
        # By bin: weights, weights times values, values that were counted, their sum, and the sum
        # of their squares.
        self._sums = torch.zeros(5, _BINS, dtype=torch.float64)

    def add(self, normal: Tensor, weights: Tensor, counted: Tensor) -> None:
        """Adds values between -1 and 1.

        Args:
            normal: any shape; what lies beyond counts as the end.
            weights: the same shape, not negative: the diagonal of the Fisher information, which is
                the squared gradient (eq. 3).
            counted: the same shape, bool.
        """
        x = normal[counted].clamp(-1, 1).double().cpu()
        w = weights[counted].double().cpu()
        bins = ((x + 1) / 2 * _BINS).long().clamp_(max=_BINS - 1)
        parts = torch.stack([w, w * x, torch.ones_like(x), x, x * x])
        self._sums.index_add_(1, bins, parts)

    def codebook(self, bits: int, seed: int) -> tuple[float, ...]:
        """``2^bits`` values in rising order; evenly spaced where fewer were seen."""
        weights, products, *_ = self._sums
        filled = weights > 0
        points = products[filled] / weights[filled]
        count = 1 << bits
        if len(points) < count:
            return tuple(torch.linspace(-1, 1, count).tolist())
        # In one dimension few starts find the least sum; ten find it reliably.
        means = k_means()(n_clusters=count, n_init=10, random_state=seed)
        means.fit(points.numpy().reshape(-1, 1), sample_weight=weights[filled].numpy())
        return tuple(sorted(means.cluster_centers_.flatten().tolist()))

    def qnorm(self, codebook: tuple[float, ...]) -> tuple[float, float]:
        """Factor and offset with which the codebook has the mean and the standard deviation of what
        it stands for (Q-Norm, section 3.5)."""
        _, _, counts, sums, squares = self._sums
        total = counts.sum()
        values = torch.tensor(codebook, dtype=torch.float64)
        filled = counts > 0
        middles = values.unfold(0, 2, 1).mean(1)
        rounded = values[torch.bucketize(sums[filled] / counts[filled], middles)]
        mean, rounded_mean = sums.sum() / total, (rounded * counts[filled]).sum() / total
        spread = (squares.sum() / total - mean.square()).clamp(min=0).sqrt()
        variance = (rounded.square() * counts[filled]).sum() / total - rounded_mean.square()
        if not variance > 0:
            return 1.0, 0.0
        factor = spread / variance.sqrt()
        return float(factor), float(mean - rounded_mean * factor)
