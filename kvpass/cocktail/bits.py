"""`ChunkBits`: in how many bits each chunk of each sequence's context is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kvpass.errors import OptionError, shown


@dataclass(frozen=True)
class ChunkBits:
    """Bits by chunk, for each sequence of a batch (Cocktail, section III-A). What lies outside the
    chunks (padding and system prompt in front, tail and query behind) is no part of it.

    Attributes:
        bits: for each sequence, the bits of each chunk: those of the recipe's levels, 16 for a
            chunk that stays exact.
        starts: for each sequence, at which token of the model's input its first chunk begins,
            padding on the left included.
        chunk: tokens in a chunk.
        scores: how relevant each chunk was found to be, for pictures.

    Raises:
        OptionError: if a value is not allowed, or the lengths do not add up.
    """

    bits: tuple[tuple[float, ...], ...]
    starts: tuple[int, ...]
    chunk: int = 32
    scores: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("bits", _rows("bits", self.bits, _number)),
            ("starts", _row("starts", self.starts, index)),
            ("scores", None if self.scores is None else _rows("scores", self.scores, _number)),
        ):
            object.__setattr__(self, name, value)
        check_chunk(self.chunk)
        if not self.bits:
            raise OptionError("bits is empty; allowed: the bits of at least one sequence.")
        if wrong := [b for row in self.bits for b in row if not 0 <= b <= 16]:
            raise OptionError(f"bits of {wrong[0]} are not supported; allowed: 0 to 16.")
        if len(self.starts) != len(self.bits):
            raise OptionError(
                f"starts has {len(self.starts)} sequences, but bits has {len(self.bits)}."
            )
        if min(self.starts) < 0:
            raise OptionError(
                f"starts={min(self.starts)} is not supported; allowed: a position in the input, "
                "at least 0."
            )
        if self.scores is not None and [*map(len, self.scores)] != [*map(len, self.bits)]:
            raise OptionError(
                f"scores are of {[*map(len, self.scores)]} chunks, but bits of "
                f"{[*map(len, self.bits)]}."
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """For each sequence, the token of the model's input at which its last chunk ends."""
        return tuple(
            start + self.chunk * len(row) for start, row in zip(self.starts, self.bits, strict=True)
        )

    @staticmethod
    def of_spans(
        spans: Iterable[tuple[int, int, float]],
        length: int,
        chunk: int = 32,
        *,
        start: int = 0,
        rest: float = 2,
    ) -> ChunkBits:
        """The bits of one sequence from ranges of its tokens: a chunk gets the most bits that any
        of its tokens has. Batches: `ChunkBits.of_batch`.

        Args:
            spans: ``(begin, end, bits)``, tokens of the context from ``begin`` up to, but without,
                ``end``.
            length: tokens of the context. What is left behind its last whole chunk stays exact.
            chunk: tokens.
            start: at which token of the model's input the context begins.
            rest: bits of tokens in no range.

        Raises:
            OptionError: if a range is empty or leaves the context, or as `ChunkBits`.
        """
        check_chunk(chunk)
        bits: list[float] = [-1] * length
        for begin, end, wanted in spans:
            if not 0 <= begin < end <= length:
                raise OptionError(
                    f"span ({begin}, {end}) is not supported; allowed: a range of the context's "
                    f"{length} tokens, not empty."
                )
            bits[begin:end] = [max(b, wanted) for b in bits[begin:end]]
        bits = [rest if b < 0 else b for b in bits]
        found = (max(bits[i : i + chunk]) for i in range(0, length - length % chunk, chunk))
        return ChunkBits((tuple(found),), (start,), chunk)

    @staticmethod
    def of_batch(parts: Sequence[ChunkBits]) -> ChunkBits:
        """The sequences of all ``parts``, one behind the other.

        Raises:
            OptionError: if their chunks are not of one length, or some have scores and some none.
        """
        kinds = {(p.chunk, p.scores is None) for p in parts}
        if len(kinds) != 1:
            raise OptionError(
                "Parts of a batch need chunks of one length, and all of them scores or none; given "
                f"are chunks of {sorted({p.chunk for p in parts})} tokens."
            )
        ((chunk, plain),) = kinds
        return ChunkBits(
            tuple(row for p in parts for row in p.bits),
            tuple(start for p in parts for start in p.starts),
            chunk,
            None if plain else tuple(row for p in parts for row in p.scores or ()),
        )


def check_chunk(chunk: Any) -> None:
    """Raises:
    OptionError: if a chunk cannot have so many tokens.
    """
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise OptionError(
            f"chunk={shown(chunk)} is not supported; allowed: a whole number of tokens, at least 1."
        )


def _rows(name: str, rows: Any, kind: Any) -> tuple[tuple[Any, ...], ...]:
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise OptionError(
            f"{name}={shown(rows)} is not supported; allowed: a row for each sequence."
        )
    return tuple(_row(name, row, kind) for row in rows)


def _row(name: str, row: Any, kind: Any) -> tuple[Any, ...]:
    """The numbers of one row, which may be a list, a tensor or an array."""
    try:
        return tuple(kind(value) for value in row)
    except (TypeError, ValueError):
        what = "whole numbers" if kind is index else "numbers"
        raise OptionError(f"{name} has {shown(row)}; allowed: a row of {what}.") from None


def _number(value: Any) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number
