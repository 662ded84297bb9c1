"""Means with standard errors over texts, and rankings that say what is a tie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

# A difference of fewer standard errors is a tie.
_ERRORS = 2.0


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; nan if there is only one text."""

    mean: float
    error: float

    @property
    def certain(self) -> bool:
        """Whether the mean differs from 0 by more than two standard errors."""
        return abs(self.mean) > _ERRORS * self.error

    @property
    def percent(self) -> Estimate:
        """The relative change, in percent, that a difference of logarithms stands for."""
        factor = math.exp(self.mean)
        return Estimate(100 * (factor - 1), 100 * factor * self.error)

    def __format__(self, spec: str) -> str:
        error = "?" if math.isnan(self.error) else format(self.error, spec.lstrip("+"))
        return f"{self.mean:{spec}} ±{error}"

    def __rmul__(self, factor: float) -> Estimate:
        return Estimate(factor * self.mean, factor * self.error)


def estimate(totals: Tensor, counts: Tensor) -> Estimate:
    """Mean of what texts add up to, per unit, and its standard error.

    Units of a text, tokens say, are not independent of each other, texts are: the error is that of
    a ratio of two sums over texts (Cochran, Sampling Techniques, 1977, chapter 6).

    Args:
        totals: sums of each text ``[N]``.
        counts: units of each text ``[N]``; texts without any do not count.
    """
    totals, counts = totals[counts > 0].double(), counts[counts > 0].double()
    if not len(counts):
        return Estimate(math.nan, math.nan)
    mean, number = float(totals.sum() / counts.sum()), len(counts)
    if number == 1:
        return Estimate(mean, math.nan)
    spread = float((totals - mean * counts).square().sum()) * number / (number - 1)
    return Estimate(mean, math.sqrt(spread) / float(counts.sum()))


def ranking(
    totals: Mapping[str, Tensor], counts: Tensor
) -> dict[str, tuple[Estimate, Estimate | None]]:
    """All names by `estimate`, the least first: that, and by how much it is more than the one
    before, paired: over the same texts (None for the first). A difference that is not `certain` is
    a tie: noise could put one in front of the other. ``counts`` are the same for all."""
    found = {name: estimate(total, counts) for name, total in totals.items()}
    order = sorted(found, key=lambda name: found[name].mean)
    behind = [estimate(totals[b] - totals[a], counts) for a, b in pairwise(order)]
    return {n: (found[n], b) for n, b in zip(order, [None, *behind], strict=False)}
