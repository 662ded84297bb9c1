"""Facts about the channels of a cache tensor: the basis in which it holds them (`ChannelOrder`,
`ChannelRotation`), and `ChannelRanges`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self
from zlib import crc32

import torch
from torch import Tensor

from kvpass.errors import PlanError
from kvpass.format.dtypes import dtype_name
from kvpass.format.ranks import Ranks

_DTYPES = {"int32": torch.int32, "int16": torch.int16, "float32": torch.float32}
# How far the product of a rotation and its transpose may be from one: float32, a sum over channels.
_ORTHOGONAL = 1e-4


@dataclass(frozen=True, repr=False)
class ChannelData:
    """Numbers for the channels of each KV head.

    Frozen, hashable and quick to compare, as Dynamo guards on it in every step.

    Attributes:
        heads: KV heads.
        data: the numbers as bytes, little-endian, head by head.
        dtype: ``int16``, ``int32`` or ``float32``.
    """

    heads: int
    data: bytes
    dtype: str = "int16"

    @property
    def dim(self) -> int:
        """Channels per head."""
        return self._numbers

    @property
    def _numbers(self) -> int:
        """Numbers per head."""
        return len(self.data) // _DTYPES[self.dtype].itemsize // self.heads

    def of_rank(self, ranks: Ranks, heads: int) -> Self:
        """The numbers of the ``heads`` of one of ``ranks``, if these are those of all; else they
        stay as they are."""
        if self.heads != heads * len(ranks.every):
            return self
        return replace(self, heads=heads, data=ranks.part(self.data))

    def unsupported_reason(self, heads: int | None, dim: int) -> str | None:
        """Why ``heads`` (None: any number) of ``dim`` channels do not fit, behind "it is", or
        None."""
        if self.dim == dim and heads in (None, self.heads):
            return None
        return (
            f"for {self.heads} heads of {self.dim} channels, the model has "
            f"{'heads' if heads is None else f'{heads} heads'} of {dim}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.heads}x{self.dim}, {crc32(self.data):08x})"


@dataclass(frozen=True, repr=False)
class ChannelOrder(ChannelData):
    """The order in which a cache tensor holds the channels: cached channel ``j`` of KV head ``h``
    is the model's channel ``order[h, j]``. Make one with `of`."""

    word: ClassVar[str] = "channel order"

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

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The order, int64 ``[H, D]``; shared, not to be changed."""
        return _order_and_inverse(self, str(device))[0]

    def store(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, n, D]``, in the model's order, as the cache holds it."""
        order, _ = _order_and_inverse(self, str(x.device))
        return torch.take_along_dim(x, order[None, :, None], dim=3)

    def restore(self, x: Tensor) -> Tensor:
        """Inverse of `store`."""
        _, inverse = _order_and_inverse(self, str(x.device))
        return torch.take_along_dim(x, inverse[None, :, None], dim=3)


@dataclass(frozen=True, repr=False)
class ChannelRotation(ChannelData):
    """The orthogonal matrix by which a cache tensor holds the channels: those of KV head ``h`` are
    ``x @ R[h]``, or ``x @ R[0]`` in all heads if there is one matrix. Make one with `of`."""

    word: ClassVar[str] = "channel rotation"

    @staticmethod
    def of(rotation: Tensor) -> ChannelRotation:
        """From ``rotation``, floating ``[H or 1, D, D]``, which is kept in float32.

        Raises:
            PlanError: if it has another dtype or shape, or a matrix is not orthogonal.
        """
        square = isinstance(rotation, Tensor) and rotation.dim() == 3
        square = square and rotation.shape[1] == rotation.shape[2]
        if not square or not rotation.is_floating_point() or not rotation.numel():
            raise PlanError(
                f"A channel rotation is {_kind(rotation)}; allowed: floating [heads, D, D]."
            )
        wide = rotation.detach().double().cpu()
        identity = torch.eye(wide.shape[1], dtype=wide.dtype)
        error = float((wide @ wide.transpose(1, 2) - identity).abs().max())
        # Not true of a NaN either.
        if not error <= _ORTHOGONAL:
            raise PlanError(
                f"A channel rotation is not orthogonal: R @ R.T differs from 1 by {error:.3g}."
            )
        data = wide.float().numpy().astype("<f4").tobytes()
        return ChannelRotation(rotation.shape[0], data, "float32")

    @property
    def dim(self) -> int:
        """Channels per head."""
        return math.isqrt(self._numbers)

    def unsupported_reason(self, heads: int | None, dim: int) -> str | None:
        """See `ChannelData.unsupported_reason`; one matrix fits any number of heads."""
        return super().unsupported_reason(None if self.heads == 1 else heads, dim)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The matrices, float32 ``[H, D, D]``; shared, not to be changed."""
        return _read(self, str(device)).view(self.heads, self.dim, self.dim)

    def store(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, n, D]``, in the model's basis, as the cache holds it, in the dtype of
        ``x`` (computed in float32)."""
        return (x.float() @ self.tensor(x.device)).to(x.dtype)

    def restore(self, x: Tensor) -> Tensor:
        """Inverse of `store`."""
        return (x.float() @ self.tensor(x.device).transpose(1, 2)).to(x.dtype)


# How the channels of each head are held: all of the model's, in an order or rotated.
ChannelBasis = ChannelOrder | ChannelRotation


@dataclass(frozen=True, repr=False)
class ChannelRanges(ChannelData):
    """The qparams of a codec whose ranges are calibrated, see `kvpass.format.codec`. Make one with
    `of`."""

    @staticmethod
    def of(qparams: Tensor) -> ChannelRanges:
        """From ``qparams``, int32 or int16 ``[H, 1, D]``.

        Raises:
            PlanError: if it has another dtype or shape.
        """
        dtype = str(getattr(qparams, "dtype", type(qparams).__name__)).removeprefix("torch.")
        if (
            dtype not in ("int32", "int16")
            or qparams.dim() != 3
            or qparams.shape[1] != 1
            or not qparams.numel()
        ):
            raise PlanError(f"Ranges of channels are {dtype}; allowed: int32 or int16 [H, 1, D].")
        little = qparams.cpu().numpy().astype(f"<i{qparams.itemsize}")
        return ChannelRanges(qparams.shape[0], little.tobytes(), dtype)

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The qparams ``[H, 1, D]``; shared, not to be changed."""
        return _read(self, str(device)).unsqueeze(1)


def channel_basis(numbers: Tensor) -> ChannelBasis:
    """The order int64 ``[H, D]``, or the rotation floating ``[H, D, D]``, whose numbers these are;
    raises as their ``of``."""
    kind = ChannelRotation if numbers.is_floating_point() else ChannelOrder
    return kind.of(numbers)


@lru_cache(maxsize=1024)
def _read(numbers: ChannelData, device: str) -> Tensor:
    """The numbers ``[heads, D]``."""
    # Neither fake nor an inference tensor, wherever it is asked for first.
    with torch.inference_mode(False):
        flat = torch.frombuffer(bytearray(numbers.data), dtype=_DTYPES[numbers.dtype])
        return flat.view(numbers.heads, -1).to(device)


@lru_cache(maxsize=1024)
def _order_and_inverse(order: ChannelOrder, device: str) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        forward = _read(order, device).long()
        return forward, forward.argsort(dim=1)


def _kind(order: Any) -> str:
    if isinstance(order, Tensor):
        return f"{dtype_name(order.dtype)} {list(order.shape)}"
    return type(order).__name__
