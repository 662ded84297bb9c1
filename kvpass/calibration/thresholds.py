"""Between which values the channels of keys lie, but for outliers (KVQuant, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.errors import OptionError


class Thresholds:
    """Exact percentiles of every channel, without keeping more than their tails.

    Args:
        fraction: of the tokens that lie beyond the two thresholds together; 0: the thresholds are
            the least and the largest value.
        tokens: how many there will be.
        skip: first tokens of each text that are left out.
    """

    def __init__(self, fraction: float, tokens: int, skip: int) -> None:
        if tokens < 1:
            raise OptionError(f"No text is longer than {skip} tokens; allowed: longer ones.")
        # From the ends, where the threshold lies among the sorted values; between two of them.
        self._place = fraction / 2 * (tokens - 1)
        self._skip = skip
        self._least: Tensor | None = None
        self._largest: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """``x``: ``[B, H, T, D]``."""
        # [H, D, B * T]
        seen = x[:, :, self._skip :].float().permute(1, 3, 0, 2).flatten(2)
        self._least = self._tail(self._least, seen, largest=False)
        self._largest = self._tail(self._largest, seen, largest=True)

    def _tail(self, known: Tensor | None, seen: Tensor, largest: bool) -> Tensor:
        every = seen if known is None else torch.cat([known, seen], dim=2)
        count = min(int(self._place) + 2, every.shape[2])
        return every.topk(count, dim=2, largest=largest).values

    def ends(self) -> tuple[Tensor, Tensor]:
        """The lower and the upper threshold, ``[H, D]``."""
        assert self._least is not None
        assert self._largest is not None
        return self._at_place(self._least), self._at_place(self._largest)

    def _at_place(self, tail: Tensor) -> Tensor:
        """Linear between two values, as `numpy.quantile`."""
        below = int(self._place)
        above = min(below + 1, tail.shape[2] - 1)
        return tail[..., below].lerp(tail[..., above], self._place - below)
