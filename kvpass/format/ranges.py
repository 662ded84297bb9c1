"""`ChannelRanges`: the calibrated ranges of the channels of one cache tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from kvpass.errors import PlanError

_DTYPES = {"int32": torch.int32, "int16": torch.int16}


@dataclass(frozen=True)
class ChannelRanges:
    """The params of a codec whose ranges are calibrated; make one with `of`.

    Frozen, hashable and quick to compare, as `ChannelOrder` is.

    Attributes:
        heads: KV heads.
        dtype: ``int32`` or ``int16``, see `kvpass.format.codec`.
        params: as bytes, little-endian ``[heads, D]``.
    """

    heads: int
    dtype: str
    params: bytes

    @staticmethod
    def of(params: Tensor) -> ChannelRanges:
        """From ``params``, int32 or int16 ``[H, 1, D]``.

        Raises:
            PlanError: if it has another dtype or shape.
        """
        dtype = str(getattr(params, "dtype", type(params).__name__)).removeprefix("torch.")
        if dtype not in _DTYPES or params.dim() != 3 or params.shape[1] != 1 or not params.numel():
            raise PlanError(f"Ranges of channels are {dtype}; allowed: int32 or int16 [H, 1, D].")
        little = params.cpu().numpy().astype(f"<i{params.itemsize}")
        return ChannelRanges(params.shape[0], dtype, little.tobytes())

    @property
    def dim(self) -> int:
        """Channels per head."""
        return len(self.params) // _DTYPES[self.dtype].itemsize // self.heads

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The params ``[H, 1, D]``; shared, not to be changed."""
        return _tensor(self, str(device))

    def misfit(self, heads: int | None, dim: int, dtype: torch.dtype) -> str | None:
        """Why they are not those of ``heads`` (None: any number) of ``dim`` channels, or None."""
        if self.dim != dim or heads not in (None, self.heads):
            return (
                f"they are for {self.heads} heads of {self.dim} channels, the model has "
                f"{'heads' if heads is None else f'{heads} heads'} of {dim}"
            )
        if _DTYPES[self.dtype] != dtype:
            return f"they are {self.dtype}, the codec's are {str(dtype).removeprefix('torch.')}"
        return None

    def __repr__(self) -> str:
        return f"ChannelRanges({self.heads}x{self.dim}, {crc32(self.params):08x})"


@lru_cache(maxsize=1024)
def _tensor(ranges: ChannelRanges, device: str) -> Tensor:
    # Neither fake nor an inference tensor, wherever it is asked for first.
    with torch.inference_mode(False):
        flat: Any = torch.frombuffer(bytearray(ranges.params), dtype=_DTYPES[ranges.dtype])
        tensor: Tensor = flat.view(ranges.heads, 1, -1).to(device)
        return tensor
