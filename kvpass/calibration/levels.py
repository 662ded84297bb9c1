"""Lloyd-Max levels: the codebook with the least error for numbers of a known distribution."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# Numbers that are drawn, and steps of Lloyd's algorithm: the levels settle to 3 digits.
_DRAWN = 2**19
_STEPS = 100


@lru_cache(maxsize=256)
def gaussian_levels(bits: int, group: int) -> tuple[float, ...]:
    """The ``2^bits`` values, in rising order, for groups of independent Gaussian numbers whose
    ranges are -1 to 1: those with the least squared error of the numbers themselves.

    What a rotation spreads over many channels is nearly Gaussian (TurboQuant, section 3.1), so that
    these levels need no texts. They stand for a range that is clipped around its centre: that of
    large groups is wide. Lloyd's algorithm (Lloyd, 1982) on a fixed draw, which is mirrored, as the
    levels are.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_DRAWN // group, group, generator=generator, dtype=torch.float64)
    low, high = x.aminmax(dim=1, keepdim=True)
    half = (high - low) / 2
    normal, order = ((x - low) / half - 1).flatten().sort()
    # The error of a number is that of its level times half the range.
    weights = half.square().expand_as(x).flatten()[order]
    sums = [_sums(weights), _sums(weights * normal)]
    levels = torch.linspace(-1, 1, 1 << bits, dtype=torch.float64)
    for _ in range(_STEPS):
        inner = torch.searchsorted(normal, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([inner.new_zeros(1), inner, inner.new_tensor([len(normal)])])
        mass, moment = (part[ends].diff() for part in sums)
        levels = moment / mass
        levels = (levels - levels.flip(0)) / 2
    return tuple(round(x, 4) for x in levels.tolist())


def _sums(x: Tensor) -> Tensor:
    """Sums of the first 0, 1, ... numbers of ``x`` ``[n]``."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])
