"""`ChunkBits`: in how many bits the chunks of a request are stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkBits:
    """The bits of the chunks of one request (Cocktail, section 3.1).

    Attributes:
        bits: for each sequence of the batch, the bits of each chunk, e.g. 2, 4 or 16.
        starts: for each sequence, at which token of the model's input its first chunk begins;
            padding on the left counts.
        chunk: tokens of a chunk.
        scores: the relevance of each chunk, if known; for pictures.
    """

    bits: tuple[tuple[float, ...], ...]
    starts: tuple[int, ...]
    chunk: int = 32
    scores: tuple[tuple[float, ...], ...] | None = None
