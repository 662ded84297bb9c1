"""`Rope`: which channels of stored keys are still to be rotated by rotary embeddings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kvpass.errors import PlanError, shown

_NAME = re.compile(r"(halves|neighbours)(\d+)-(\d+)")


@dataclass(frozen=True)
class Rope:
    """Keys are stored as they were before their rotary embedding (KVQuant, section 3.2).

    Channels ``start ... stop`` of each head are rotated in pairs when they are read. One *row* for
    each token holds its cosines and sines, ``[..., stop - start]``: those of the pairs, first the
    cosines, then the sines. All layers share the rows.

    Attributes:
        kind: a pair is ``i`` and ``i + (stop - start) / 2``, or ``2i`` and ``2i + 1``.
        start, stop: channels.

    Raises:
        PlanError: if the channels are no pairs.
    """

    kind: Literal["halves", "neighbours"]
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.kind not in ("halves", "neighbours") or not 0 <= self.start < self.stop:
            raise PlanError(f"Rotary embedding {self} is not supported.")
        if (self.stop - self.start) % 2:
            raise PlanError(f"Rotary embedding {self} has an odd number of channels.")

    def __str__(self) -> str:
        return f"{self.kind}{self.start}-{self.stop}"

    @staticmethod
    @cache
    def parse(text: str) -> Rope:
        """The one that prints as ``text``, e.g. ``halves0-128``."""
        if match := _NAME.fullmatch(text):
            kind: Literal["halves", "neighbours"] = (
                "halves" if match[1] == "halves" else "neighbours"
            )
            return Rope(kind, int(match[2]), int(match[3]))
        raise PlanError(
            f"Rotary embedding {shown(text)} cannot be read; allowed: e.g. 'halves0-128'."
        )

    @property
    def channels(self) -> int:
        """That are rotated; as many numbers are a row."""
        return self.stop - self.start

    def turn(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x`` ``[B, H, n, D]``, rotated by ``rows`` ``[B or 1, n, channels]``, in the dtype of
        ``x`` (computed in float32)."""
        cos, sin = rows.float().unsqueeze(1).chunk(2, dim=-1)
        part = x[..., self.start : self.stop].float()
        if self.kind == "halves":
            a, b = part.chunk(2, dim=-1)
        else:
            a, b = part[..., 0::2], part[..., 1::2]
        rotated = (a * cos - b * sin, b * cos + a * sin)
        if self.kind == "halves":
            joined = torch.cat(rotated, dim=-1)
        else:
            joined = torch.stack(rotated, dim=-1).flatten(-2)
        parts = (x[..., : self.start], joined.to(x.dtype), x[..., self.stop :])
        return torch.cat(parts, dim=-1)
