"""`RetentionPolicy`: which tokens of a cache tensor are packed and which stay exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from kvpass.errors import OptionError, check, check_whole, shown
from kvpass.format.filters import filter_named

# A step of at most this many new tokens is a decode step: packed state is read in place. A longer
# one is a prefill. The window's ring has as many spare slots, so that such a step never overwrites
# a live token.
MAX_STEP = 16


@dataclass(frozen=True)
class RetentionPolicy:
    """The exact tokens: the first `sinks` and the last `window` always stay exact; those in between
    are packed `pack_every` at a time.

    Of the last tokens a ratio may stay exact instead, if that is more than `window`. Sinks do not
    count. Either ratio keeps ``floor(ratio * T)`` of a first prompt of ``T`` tokens, computed from
    its decimals.

    Attributes:
        window: tokens.
        pack_every: tokens.
        sinks: tokens (attention sinks: SKVQ, section 3.2, after StreamingLLM).
        retained: tokens of every KV head that stay exact because ``filter`` scores them highest.
        filter: the name of a filter, see `kvpass.format.filters`.
        pivotal: ratio of the tokens that were exact when a step ended, new ones included, as KVmix
            writes it ("Dynamic Pivotal Context Selection"). Every step applies it to what the last
            one left: of a prompt, 4096 tokens at 0.1 become 416, 65, 34, ..., packed 32 at a time.
        fraction: ratio of all tokens, which is what KVmix's text promises.
    """

    window: int = 0
    pack_every: int = 1
    sinks: int = 0
    retained: int = 0
    filter: str | None = None
    pivotal: float = 0.0
    fraction: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("pack_every", 1), ("sinks", 0), ("retained", 0)):
            check_whole(name, getattr(self, name), least)
        if self.filter is not None:
            filter_named(self.filter)
        if (self.filter is None) != (self.retained == 0):
            raise OptionError(
                f"filter={shown(self.filter)} is not supported with retained={self.retained}; "
                "allowed: a filter and a number of tokens, or neither."
            )
        for name in ("pivotal", "fraction"):
            ratio: Any = getattr(self, name)
            # Few decimals: products with numbers of tokens fit into 64 bits.
            fits = type(ratio) is float and 0 <= ratio < 1 and round(ratio, 3) == ratio
            check(name, ratio, fits, "from 0.0 to 0.999, in steps of 0.001")
        if self.pivotal and self.fraction:
            raise OptionError(
                f"pivotal={self.pivotal} is not supported with fraction={self.fraction}; allowed: "
                "one of them."
            )

    @cached_property
    def ratio(self) -> tuple[int, int]:
        """Numerator and denominator of the ratio of tokens that stay exact."""
        return Fraction(str(self.pivotal or self.fraction)).as_integer_ratio()

    @property
    def grows(self) -> bool:
        """Whether the number of tokens that stay exact depends on that of all."""
        return bool(self.pivotal or self.fraction)

    def window_only(self) -> RetentionPolicy:
        """Without tokens that stay exact for their own sake."""
        return RetentionPolicy(self.window, self.pack_every)

    def of_single_steps(self) -> RetentionPolicy:
        """A rule without a pivotal ratio that does the same where every token has a step of its
        own: each time that tokens are packed, as many stay."""
        if not self.pivotal:
            return self
        exact = self.pack_every
        while not self.due(exact):
            exact += 1
        return replace(self, window=exact - self.pack_every, pivotal=0.0)

    def stay(self, exact: int, packed: int = 0) -> int:
        """The least number of ``exact`` unpacked tokens behind ``packed`` others that stay so, if
        there are as many. Sinks do not count. Both may be symbolic."""
        if not self.grows:
            return self.window
        numerator, denominator = self.ratio
        counted = exact if self.pivotal else packed + exact
        least: int = torch.sym_max(counted * numerator // denominator, self.window)
        return least

    def due(self, exact: int, packed: int = 0) -> int:
        """The number of ``exact`` unpacked tokens behind ``packed`` others to be packed now: whole
        multiples of `pack_every` beyond those that `stay`. Sinks do not count.

        Both may be symbolic (`torch.sym_max` leaves no guard behind).
        """
        beyond: int = torch.sym_max(exact - self.stay(exact, packed), 0)
        return beyond // self.pack_every * self.pack_every

    def packed_before(self, tokens: int) -> int:
        """The position at which packed tokens end in the step of the token behind ``tokens``
        others, sinks counted, if every token had a step of its own: 0 as long as none is packed.
        Not for ratios, which depend on how the tokens came.
        """
        assert not self.grows
        due = self.due(max(tokens - self.sinks, 0))
        return self.sinks + due if due else 0
