"""`Shard`: the part of every sequence that one process of several holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

# Consecutive tokens that one process holds, a multiple of what shares qparams.
BLOCK = 128

_Number = TypeVar("_Number", int, Tensor)
_SHARD = re.compile(r"(\d+)of(\d+)(?:\+(\d+))?@([^/|,]+)")


@dataclass(frozen=True)
class Shard:
    """Blocks of `BLOCK` tokens go to the processes in turn: block ``b`` to process ``b % size``,
    what comes before them to the first one.

    The own tokens of a process keep their order. Numbers of tokens may be symbolic.

    Attributes:
        rank: the place of this process among the others.
        size: how many there are.
        group: the name of their process group.
        first: where the first block begins, at most `BLOCK`.
    """

    rank: int
    size: int
    group: str
    first: int = 0

    def __str__(self) -> str:
        first = f"+{self.first}" if self.first else ""
        return f"{self.rank}of{self.size}{first}@{self.group}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The shard that prints as ``text``; None if there is none."""
        match = _SHARD.fullmatch(text)
        if match is None:
            return None
        rank, size, first, group = match.groups()
        return cls(int(rank), int(size), group, int(first or 0))

    @property
    def head(self) -> int:
        """How many own tokens come before the blocks."""
        return 0 if self.rank else self.first

    def own(self, tokens: int, block: int = BLOCK) -> int:
        """How many of the first ``tokens`` are here, dealt in blocks of so many."""
        behind, head = tokens, 0
        if self.first:
            behind = torch.sym_max(tokens - self.first, 0)
            head = torch.sym_min(tokens, self.head)
        turn = self.size * block
        begun = behind % turn - self.rank * block
        here: int = torch.sym_min(torch.sym_max(begun, 0), block)
        return head + behind // turn * block + here

    def own_of(self, ends: Tensor) -> Tensor:
        """`own` of each of these numbers of tokens."""
        turn, behind = self.size * BLOCK, (ends - self.first).clamp(min=0)
        here = (behind % turn - self.rank * BLOCK).clamp(0, BLOCK)
        return ends.clamp(max=self.head) + behind // turn * BLOCK + here

    def most(self, tokens: int) -> int:
        """How many of ``tokens`` in a row are here at most."""
        turn = self.size * BLOCK
        here: int = torch.sym_min(tokens % turn, BLOCK)
        found: int = torch.sym_min(tokens // turn * BLOCK + here + self.head, tokens)
        return found

    def share(self, tokens: int) -> int:
        """Room for what any process holds of the first ``tokens``, behind as much as `head` of the
        first one: whole blocks."""
        behind = torch.sym_max(tokens - self.first, 0) if self.first else tokens
        return self.first - (-behind // (self.size * BLOCK)) * BLOCK

    def positions(self, numbers: Tensor) -> Tensor:
        """Where the own tokens with these numbers stand in the sequence."""
        found = self._in_blocks(numbers - self.head)
        return torch.where(numbers < self.head, numbers, found) if self.head else found

    def _position(self, number: int) -> int:
        return number if number < self.head else self._in_blocks(number - self.head)

    def _in_blocks(self, number: _Number) -> _Number:
        """Where the own token of the blocks with this number stands in the sequence."""
        block = number // BLOCK * self.size + self.rank
        return self.first + block * BLOCK + number % BLOCK

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
        blocks, batch = (share - self.first) // BLOCK, rows // self.size
        shape = (self.size, batch, heads, blocks, BLOCK, channels)
        joined = parts[:, :, self.first :].reshape(shape).permute(1, 2, 3, 0, 4, 5)
        flat = joined.reshape(batch, heads, self.size * blocks * BLOCK, channels)
        if self.first:
            flat = torch.cat([parts[:batch, :, : self.first], flat], dim=2)
        return flat[:, :, :tokens]


# That of a process alone.
WHOLE = Shard(0, 1, "0")
