"""`Shard`: the part of every sequence that one process of several holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

# Consecutive tokens that one process holds, a multiple of what shares qparams.
BLOCK = 128

_SHARD = re.compile(r"(\d+)of(\d+)@([^/|,]+)")


@dataclass(frozen=True)
class Shard:
    """Blocks of `BLOCK` tokens go to the processes in turn: block ``b`` to process ``b % size``.

    The own tokens of a process keep their order. Numbers of tokens may be symbolic.

    Attributes:
        rank: the place of this process among the others.
        size: how many there are.
        group: the name of their process group.
    """

    rank: int
    size: int
    group: str

    def __str__(self) -> str:
        return f"{self.rank}of{self.size}@{self.group}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The shard that prints as ``text``; None if there is none."""
        match = _SHARD.fullmatch(text)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])

    def own(self, tokens: int, block: int = BLOCK) -> int:
        """How many of the first ``tokens`` are here, dealt in blocks of so many."""
        turn = self.size * block
        begun = tokens % turn - self.rank * block
        here: int = torch.sym_min(torch.sym_max(begun, 0), block)
        return tokens // turn * block + here

    def own_of(self, ends: Tensor) -> Tensor:
        """`own` of each of these numbers of tokens."""
        turn = self.size * BLOCK
        return ends // turn * BLOCK + (ends % turn - self.rank * BLOCK).clamp(0, BLOCK)

    def most(self, tokens: int) -> int:
        """How many of ``tokens`` in a row are here at most."""
        turn = self.size * BLOCK
        here: int = torch.sym_min(tokens % turn, BLOCK)
        return tokens // turn * BLOCK + here

    def share(self, tokens: int) -> int:
        """Room for what any process holds of the first ``tokens``: whole blocks."""
        return -(-tokens // (self.size * BLOCK)) * BLOCK

    def positions(self, numbers: Tensor) -> Tensor:
        """Where the own tokens with these numbers stand in the sequence."""
        return (numbers // BLOCK * self.size + self.rank) * BLOCK + numbers % BLOCK

    def _position(self, number: int) -> int:
        return (number // BLOCK * self.size + self.rank) * BLOCK + number % BLOCK

    def select(self, x: Tensor, dim: int, first: int = 0) -> Tensor:
        """The own ones of tokens along ``dim`` of ``x``, whose first one stands at ``first``."""
        start, end = self.own(first), self.own(first + x.shape[dim])
        if start == end:
            return x.narrow(dim, 0, 0)
        if x.shape[dim] <= BLOCK:
            # They come one behind the other.
            return x.narrow(dim, self._position(start) - first, end - start)
        numbers = torch.arange(start, end, device=x.device)
        return x.index_select(dim, self.positions(numbers) - first)

    def in_order(self, parts: Tensor, tokens: int) -> Tensor:
        """All ``tokens`` ``[B, H, T, D]`` of the parts of all processes ``[size * B, H, N, D]``,
        where ``N`` is their `share`."""
        rows, heads, share, channels = parts.shape
        shape = (self.size, rows // self.size, heads, share // BLOCK, BLOCK, channels)
        joined = parts.view(shape).permute(1, 2, 3, 0, 4, 5)
        flat = joined.reshape(shape[1], heads, self.size * share, channels)
        return flat[:, :, :tokens]


# That of a process alone.
WHOLE = Shard(0, 1, "0")
