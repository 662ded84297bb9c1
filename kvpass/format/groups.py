"""`Groups`: which elements of a cache tensor share a scale and a minimum, in plain ATen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Axis = Literal["channel", "token"]


@dataclass(frozen=True)
class Groups:
    """The groups of ``[B, H, T, D]``.

    One number for each group is ``[B, H, T/G, D]`` (per channel) or ``[B, H, T, D/G]`` (per token;
    ``[B, H/k, T, 1]`` where a group spans ``k`` heads).

    Attributes:
        axis: ``channel``: ``size`` consecutive tokens of one channel. ``token``: ``size`` channels
            of one token.
        size: elements of a group, on average; 0 per channel: all tokens.
        half_split: per token: a group is two runs of channels, half a head apart, so that rotary
            embeddings which rotate the halves of a head do not leave it.
        sizes: per token: the number of channels of each group, head by head (with ``half_split``,
            half of them in each half of the head); None: all are equal.
    """

    axis: Axis
    size: int
    half_split: bool = False
    sizes: tuple[int, ...] | None = None

    def heads_per_group(self, dim: int) -> int:
        """Heads that a group spans."""
        return max(1, self.size // dim) if self.axis == "token" and dim else 1

    def unsupported_reason(self, dim: int, heads: int | None) -> str | None:
        """Why ``heads`` (None: any number) of ``dim`` channels cannot be divided so, or None."""
        if self.axis == "channel":
            return None
        heads_per_group = self.heads_per_group(dim)
        if not dim or max(self.size, dim) % min(self.size, dim):
            return f"group {self.size} does not divide head_dim {dim}"
        if heads is not None and heads % heads_per_group:
            return (
                f"group {self.size} spans {heads_per_group} heads of {dim}, which {heads} do not "
                "fill"
            )
        if self.half_split and (dim % 2 or self.size % 2 or heads_per_group > 1):
            return f"a group of {self.size} is no two runs half a head of {dim} apart"
        if self.sizes is None or heads is None:
            return None
        count = dim // self.size
        by_head = [self.sizes[i : i + count] for i in range(0, len(self.sizes), count)]
        if len(self.sizes) != heads * count or any(sum(sizes) != dim for sizes in by_head):
            return (
                f"{len(self.sizes)} sizes of groups do not fill {heads} heads of {dim} channels "
                f"with {count} groups each"
            )
        if self.half_split and any(size % 2 for size in self.sizes):
            return "a group in two halves has an odd number of channels"
        return None

    def shape(self, batch: int, heads: int, tokens: int, dim: int) -> tuple[int, int, int, int]:
        """The shape of one number for each group."""
        if self.axis == "channel":
            return batch, heads, tokens // self.size if self.size else 1, dim
        heads_per_group = self.heads_per_group(dim)
        return batch, heads // heads_per_group, tokens, dim * heads_per_group // self.size

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest element of each group of ``x`` ``[B, H, T, D]``."""
        shape = self.shape(*x.shape)
        if self.sizes is None:
            split, dims = self.split(x), self._dims(x.shape[3])
            return split.amin(dims).reshape(shape), split.amax(dims).reshape(shape)
        index = self.members(x.shape[1], x.shape[3], x.device)[None, :, None].expand(x.shape)
        empty = x.new_zeros(shape)
        low = empty.scatter_reduce(3, index, x, "amin", include_self=False)
        return low, empty.scatter_reduce(3, index, x, "amax", include_self=False)

    def split(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, T, D]`` in a shape in which `spread` numbers broadcast."""
        b, h, t, d = x.shape
        if self.axis == "channel":
            return x.reshape(b, h, t // self.size, self.size, d) if self.size else x.unsqueeze(2)
        heads_per_group = self.heads_per_group(d)
        if heads_per_group > 1:
            return x.reshape(b, h // heads_per_group, heads_per_group, t, d)
        if self.sizes is not None:
            return x
        if self.half_split:
            return x.reshape(b, h, t, 2, d // self.size, self.size // 2)
        return x.reshape(b, h, t, d // self.size, self.size)

    def spread(self, number: Tensor, heads: int, dim: int) -> Tensor:
        """One number for each group, to be broadcast with what `split` makes of ``heads`` of
        ``dim`` channels."""
        if self.sizes is not None:
            index = self.members(heads, dim, number.device)
            return torch.take_along_dim(number, index[None, :, None], dim=3)
        if self.heads_per_group(dim) > 1:
            return number.unsqueeze(2)
        for grouped in self._dims(dim):
            number = number.unsqueeze(grouped)
        return number

    def members(self, heads: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
        """Per token: the group of each channel within its head, int64 ``[heads, dim]``; shared, not
        to be changed."""
        # No inference tensor, wherever it is asked for first.
        with torch.inference_mode(False):
            return _members(self, heads, dim, str(device))

    def _dims(self, dim: int) -> tuple[int, ...]:
        """The dimensions of `split` that are one group."""
        if self.axis == "channel":
            return (3,)
        if self.heads_per_group(dim) > 1:
            return (2, 4)
        return (3, 5) if self.half_split else (4,)


@lru_cache(maxsize=1024)
def _members(groups: Groups, heads: int, dim: int, device: str) -> Tensor:
    count = max(1, dim // groups.size)
    sizes = groups.sizes or (min(groups.size, dim),) * (heads * count)
    shape = (heads, 2 if groups.half_split else 1, count)
    channels = torch.tensor(sizes, device=device).view(heads, 1, count) // shape[1]
    numbers = torch.arange(count, device=device).expand(shape).flatten()
    return numbers.repeat_interleave(channels.expand(shape).flatten()).view(heads, dim)
