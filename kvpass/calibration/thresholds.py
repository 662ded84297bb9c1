"""The values between which channels lie, but for outliers (KVQuant, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.errors import OptionError


class Thresholds:
    """Exact percentiles of every channel, without keeping more than their tails.

    Args:
        fraction: how much of the tokens lies beyond the two thresholds together; 0: they are the
            least and the largest value.
        tokens: how many there will be.
        skip: first tokens of each text that are left out.

    Raises:
        OptionError: if there will be none.
    """

    def __init__(self, fraction: float, tokens: int, skip: int) -> None:
        if tokens < 1:
            raise OptionError(f"No text is longer than {skip} tokens; allowed: longer ones.")
        # Where the threshold lies among the sorted values, counted from either end.
        self._rank = fraction / 2 * (tokens - 1)
        self._skip = skip
        self._least = self._largest = torch.empty(0)

    def add(self, x: Tensor) -> None:
        """Adds the tokens of ``x`` ``[B, H, T, D]``."""
        # [H, D, B * T]
        new = x[:, :, self._skip :].float().permute(1, 3, 0, 2).flatten(2)
        self._least = self._tail(self._least, new, largest=False)
        self._largest = self._tail(self._largest, new, largest=True)

    def _tail(self, known: Tensor, new: Tensor, largest: bool) -> Tensor:
        every = torch.cat([known, new], dim=2) if known.numel() else new
        count = min(int(self._rank) + 2, every.shape[2])
        return every.topk(count, dim=2, largest=largest).values

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The lower and the upper threshold, ``[H, D]``."""
        below = int(self._rank)
        # Linear between two values, as `numpy.quantile`.
        low, high = (
            tail[..., below].lerp(tail[..., min(below + 1, tail.shape[2] - 1)], self._rank - below)
            for tail in (self._least, self._largest)
        )
        return low, high
