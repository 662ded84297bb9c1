"""`ChannelOrder`: in which order a cache tensor holds the channels of each head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from kvpass.errors import PlanError


@dataclass(frozen=True)
class ChannelOrder:
    """Cached channel ``j`` of KV head ``h`` is the model's channel ``order[h, j]``.

    Frozen, hashable and quick to compare, as Dynamo guards on it in every step; make one with `of`.

    Attributes:
        heads: KV heads.
        channels: ``order`` as bytes, little-endian int16 ``[heads, D]``.
    """

    heads: int
    channels: bytes

    @staticmethod
    def of(order: Tensor) -> ChannelOrder:
        """From ``order``, int64 ``[H, D]``.

        Raises:
            PlanError: if it has another dtype or shape, or a row is no permutation.
        """
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or order.dim() != 2:
            raise PlanError(f"A channel order is {_kind(order)}; allowed: int64 [heads, channels].")
        heads, dim = order.shape
        # int16 is what the bytes hold.
        if not heads or not 0 < dim < 2**15:
            raise PlanError(f"A channel order is {_kind(order)}, which fits no attention heads.")
        if not order.sort(dim=1).values.eq(torch.arange(dim, device=order.device)).all():
            raise PlanError(
                f"A channel order is no permutation: each row must hold 0 to {dim - 1} once."
            )
        return ChannelOrder(heads, order.cpu().to(torch.int16).numpy().astype("<i2").tobytes())

    @property
    def dim(self) -> int:
        """Channels per head."""
        return len(self.channels) // 2 // self.heads

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The order, int64 ``[H, D]``; shared, not to be changed."""
        return _tensors(self, str(device))[0]

    def store(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, n, D]``, in the model's order, as the cache holds it."""
        return torch.take_along_dim(x, _tensors(self, str(x.device))[0][None, :, None], dim=3)

    def restore(self, x: Tensor) -> Tensor:
        """Inverse of `store`."""
        return torch.take_along_dim(x, _tensors(self, str(x.device))[1][None, :, None], dim=3)

    def misfit(self, heads: int | None, dim: int) -> str | None:
        """Why ``heads`` (None: any number) of ``dim`` channels cannot be in this order, or None."""
        if self.dim != dim or heads not in (None, self.heads):
            return (
                f"it is for {self.heads} heads of {self.dim} channels, the model has "
                f"{'heads' if heads is None else f'{heads} heads'} of {dim}"
            )
        return None

    def __repr__(self) -> str:
        return f"ChannelOrder({self.heads}x{self.dim}, {crc32(self.channels):08x})"


@lru_cache(maxsize=1024)
def _tensors(order: ChannelOrder, device: str) -> tuple[Tensor, Tensor]:
    """The order and its inverse."""
    # Neither fake nor an inference tensor, wherever it is asked for first.
    with torch.inference_mode(False):
        forward = torch.frombuffer(bytearray(order.channels), dtype=torch.int16)
        forward = forward.to(torch.int64).view(order.heads, order.dim).to(device)
        return forward, forward.argsort(dim=1)


def _kind(order: Any) -> str:
    if isinstance(order, Tensor):
        return f"{str(order.dtype).removeprefix('torch.')} {list(order.shape)}"
    return type(order).__name__
