"""`ChunkBits`: in how many bits each chunk of each sequence's context is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kvpass.errors import OptionError, check, check_whole, shown


@dataclass(frozen=True)
class ChunkBits:
    """Bits by chunk, for each sequence of a batch (Cocktail, section III-A). What lies outside the
    chunks (padding and system prompt in front, tail and query behind) is no part of it.

    Attributes:
        bits: for each sequence, the bits of each chunk: one of the recipe's, 16 for a chunk that
            stays exact.
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
        object.__setattr__(self, "bits", _rows("bits", self.bits))
        object.__setattr__(self, "starts", _row("starts", self.starts, index))
        if self.scores is not None:
            object.__setattr__(self, "scores", _rows("scores", self.scores))
        check_whole("chunk", self.chunk, 1)
        if not self.bits:
            raise OptionError("bits is empty; allowed: the bits of at least one sequence.")
        if wrong := [b for row in self.bits for b in row if not 0 <= b <= 16]:
            raise OptionError(f"bits of {wrong[0]} are not supported; allowed: 0 to 16.")
        if len(self.starts) != len(self.bits):
            raise OptionError(
                f"starts has {len(self.starts)} sequences, but bits has {len(self.bits)}."
            )
        first = min(self.starts)
        check("starts", first, first >= 0, "a position in the input, at least 0")
        counts, scored = ([len(row) for row in rows or ()] for rows in (self.bits, self.scores))
        if self.scores is not None and scored != counts:
            raise OptionError(f"scores are of {scored} chunks, but bits of {counts}.")

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
            chunk: tokens in a chunk.
            start: at which token of the model's input the context begins.
            rest: bits of tokens in no range.

        Raises:
            OptionError: if a range is empty or leaves the context, or as `ChunkBits`.
        """
        check_whole("chunk", chunk, 1)
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
            OptionError: if their chunks are not of one length, or not all have scores, or none.
        """
        if len({(p.chunk, p.scores is None) for p in parts}) != 1:
            raise OptionError(
                "Parts of a batch need chunks of one length, and all of them scores or none; given "
                f"are chunks of {sorted({p.chunk for p in parts})} tokens."
            )
        return ChunkBits(
            tuple(row for p in parts for row in p.bits),
            tuple(start for p in parts for start in p.starts),
            parts[0].chunk,
            tuple(row for p in parts for row in p.scores or ()) or None,
        )


def _rows(name: str, rows: Any) -> tuple[tuple[float, ...], ...]:
    fits = isinstance(rows, Iterable) and not isinstance(rows, str)
    check(name, rows, fits, "a row for each sequence")
    return tuple(_row(name, row, _number) for row in rows)


def _row(name: str, row: Any, kind: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The numbers of one row, which may be a list, a tensor or an array."""
    try:
        return tuple(kind(value) for value in row)
    except (TypeError, ValueError):
        what = "whole numbers" if kind is index else "numbers"
        raise OptionError(f"{name} has {shown(row)}; allowed: a row of {what}.") from None


def _number(value: Any) -> float:
    number = float(value)
    return int(number) if number.is_integer() else number
