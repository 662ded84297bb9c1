"""`ChunkedPlan`: the chunks of a prompt are stored with as many bits as each request asks for."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvpass.errors import PlanError, shown
from kvpass.format.codec import FP, Codec
from kvpass.format.layout import Field, codec_fields, codec_sizes
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TILE, Segment, TensorPlan

_PLAN = re.compile(r"(?P<codecs>[^/]+\|fp)/chunk=(?P<chunk>\d+)")


@dataclass(frozen=True)
class ChunkedPlan(TensorPlan):
    """The storage of a cache tensor whose prompts have chunks of different bits (Cocktail,
    section 4); see `kvpass.ops.chunks`. All other tokens are exact.

    Attributes:
        chunk_codecs: the codecs of chunks, from fewest to most bits; each request says which chunk
            gets which.
        chunk: a chunk's tokens are a multiple of this.

    Raises:
        PlanError: if chunks cannot be stored so, or not be asked for, or if there is a window, or a
            rotary embedding.
    """

    takes_rope: ClassVar[bool] = False
    op_suffix: ClassVar[str] = "_chunks"
    side_by_side: ClassVar[bool] = True

    chunk_codecs: tuple[Codec, ...] = ()
    chunk: int = 0

    def __post_init__(self) -> None:
        alone = self.codec.identity and self.retention == RetentionPolicy()
        if not alone or (self.window_size, self.room, self.rope) != (None, None, None):
            raise PlanError(f"Chunks ({self}) take no window, sinks or rotary embedding.")
        codecs, chunk = self.chunk_codecs, self.chunk
        if not codecs or type(chunk) is not int or chunk < 1:
            raise PlanError(
                f"chunk={shown(chunk)} is not supported with {len(codecs)} codecs of chunks; "
                "allowed: a positive number of tokens, with at least one codec."
            )
        for codec in codecs:
            if chunk % codec.token_group:
                raise PlanError(
                    f"chunk={chunk} is no multiple of the group of {codec.token_group} tokens that "
                    f"share a scale in {codec}."
                )
            if codec.static_ranges or codec.has_extras:
                raise PlanError(
                    f"Chunks cannot be stored as {codec}: calibrated ranges and outliers are not "
                    "supported there."
                )
        if len(set(self.chunk_bits)) < len(codecs) + 1:
            raise PlanError(
                f"Codecs of chunks {', '.join(map(str, codecs))} have the same bits: each needs "
                "others."
            )

    def __str__(self) -> str:
        return "|".join(map(str, (*self.chunk_codecs, FP))) + f"/chunk={self.chunk}"

    @classmethod
    def read(cls, text: str) -> Self | None:
        """See `TensorPlan.read`."""
        if (match := _PLAN.fullmatch(text)) is None:
            return None
        *codecs, _ = map(Codec.parse, match["codecs"].split("|"))
        return cls(chunk_codecs=tuple(codecs), chunk=int(match["chunk"]))

    @cached_property
    def chunk_bits(self) -> tuple[float, ...]:
        """The bits by which a request asks for each codec, and for exact tokens. A codec that
        stores tokens as they are goes by its number."""
        own = (i if c.identity else c.bits for i, c in enumerate(self.chunk_codecs))
        return (*own, FP.bits)

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """See `TensorPlan.codecs`."""
        return (*self.chunk_codecs, self.codec)

    @property
    def uniform(self) -> TensorPlan:
        """The codec in the middle for all tokens, with an exact window as KIVI has."""
        codec = self.chunk_codecs[len(self.chunk_codecs) // 2]
        if codec.identity:
            return TensorPlan()
        by_channel = codec.axis == "channel"
        window = RetentionPolicy(0, self.tile) if by_channel else RetentionPolicy(TILE)
        return TensorPlan(codec, window)

    def unsupported_pair(self, values: TensorPlan) -> str | None:
        """See `TensorPlan.unsupported_pair`."""
        if not isinstance(values, ChunkedPlan):
            return super().unsupported_pair(values)
        if (self.chunk_bits, self.chunk) != (values.chunk_bits, values.chunk):
            return f"keys {self} and values {values} do not have the same bits of chunks"
        return None

    def sliding(self, window_size: int) -> TensorPlan:
        """Without chunks: a window forgets them."""
        return self.uniform.sliding(window_size)

    def static(self, room: int) -> TensorPlan:
        """Refuses a static cache.

        Raises:
            PlanError: always.
        """
        raise PlanError("A static cache takes no chunks of different bits.")

    @property
    def tile(self) -> int:
        """See `TensorPlan.tile`."""
        return math.lcm(TILE, self.chunk)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """See `TensorPlan.segments`; those of the codecs, and that of exact tokens."""
        return tuple(map(Segment, self.codecs))

    def length(self, ends: Sequence[int]) -> int:
        """See `TensorPlan.length`; ends are how many tokens each segment has."""
        return sum(ends)

    def row_ends(self, counts: Sequence[int], tokens: int) -> list[int]:
        """The ends of a row of ``tokens`` whose segments have so many each."""
        return list(counts)

    def last_positions(self, ends: Tensor, slots: Tensor) -> Tensor:
        """Where exact tokens in these slots stand that have no position, int64 ``[B, slots]``: they
        have come last, one behind the other. ``ends``: ``segment_ends``, int64."""
        return ends[:, :-1].sum(1, keepdim=True) + slots

    @property
    def chunk_positions(self) -> tuple[str, ...]:
        """The names of the fields with the positions of each segment's tokens."""
        return tuple(f.name for f in self.layout.shared)

    def _token_fields(self) -> tuple[Field, ...]:
        found = [*super()._token_fields()]
        for i, codec in enumerate(self.chunk_codecs):
            if codec.identity:
                shape = ("batch", "heads", f"capacity{i}", "channels")
                found.append(Field(f"codes{i}", shape, grows=f"capacity{i}", exact=True))
            else:
                found += codec_fields(codec, str(i))
        return tuple(found)

    def _shared_fields(self) -> tuple[Field, ...]:
        return tuple(
            Field(f"positions{x}", ("batch", f"capacity{x}"), torch.int32, f"capacity{x}",
                  shared=True, fill=-1, overwritten="never")
            for x in (*range(len(self.chunk_codecs)), "")
        )  # fmt: skip

    def segment_fields(self, segment: int) -> tuple[str, ...]:
        """The names of the fields with one segment's tokens."""
        suffix = str(segment) if segment < len(self.chunk_codecs) else ""
        return tuple(f.name for f in self.layout.encoded(suffix))

    def chunk_sizes(self, shape: Sequence[int], room: Sequence[int]) -> dict[str, int]:
        """See `sizes`; ``room`` is that of each segment in tokens, which a request decides."""
        batch, heads, _, channels = shape
        found = {"batch": batch, "heads": heads, "channels": channels, "capacity": room[-1]}
        for i, codec in enumerate(self.chunk_codecs):
            found |= codec_sizes(codec, str(i), heads, channels) | {f"capacity{i}": room[i]}
        return found
