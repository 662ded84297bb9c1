"""`Rope`: which channels of stored keys rotary embeddings have yet to rotate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from kvpass.errors import PlanError, shown

_NAME = re.compile(r"(halves|neighbours)(\d+)-(\d+)")


@dataclass(frozen=True)
class Rope:
    """Keys are stored as they were before their rotary embedding (KVQuant, section 3.2).

    Channels ``start ... stop`` of each head are rotated in pairs when they are read. *cos_sin*
    ``[..., stop - start]`` are the numbers of a token, the same for all layers: the cosines of the
    pairs, then their sines.

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
            return Rope(cast(Any, match[1]), int(match[2]), int(match[3]))
        raise PlanError(
            f"Rotary embedding {shown(text)} cannot be read; allowed: e.g. 'halves0-128'."
        )

    @property
    def channels(self) -> int:
        """The number of channels that are rotated, and of cosines and sines together."""
        return self.stop - self.start

    def pairs(self, x: Tensor) -> Tensor:
        """The pairs of ``x`` ``[..., D]`` as complex numbers, which are turned: complex64
        ``[..., channels / 2]``."""
        halves = self.kind == "halves"
        shape = (2, -1) if halves else (-1, 2)
        parts = x[..., self.start : self.stop].float().unflatten(-1, shape)
        return torch.complex(*parts.unbind(-2 if halves else -1))

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """``x`` ``[B, H, n, D]``, rotated by ``cos_sin`` ``[B or 1, n, channels]``, in the dtype of
        ``x`` (computed in float32)."""
        cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
        dim = -2 if self.kind == "halves" else -1
        shape = (2, -1) if self.kind == "halves" else (-1, 2)
        a, b = x[..., self.start : self.stop].float().unflatten(-1, shape).unbind(dim)
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim).flatten(-2).to(x.dtype)
        return torch.cat([x[..., : self.start], rotated, x[..., self.stop :]], dim=-1)
