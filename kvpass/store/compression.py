"""Tensors that zstd has made smaller, by the package zstandard."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.errors import check, check_installed

_LEVELS = range(1, 23)


def check_level(level: int | None) -> None:
    """Refuses what is no level of compression; None is no compression.

    Raises:
        OptionError: if it is none, or zstandard is not installed.
    """
    fits = level is None or (type(level) is int and level in _LEVELS)
    check("zstd", level, fits, f"None, or a level from {_LEVELS[0]} to {_LEVELS[-1]}")
    if level is not None:
        _check_installed()


def compressed(tensor: Tensor, level: int) -> Tensor:
    """The bytes of a contiguous tensor, compressed, uint8 ``[N]``."""
    import zstandard

    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    found = zstandard.ZstdCompressor(level).compress(data)
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def decompressed(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that `compressed` has made ``data`` of.

    Raises:
        OptionError: if zstandard is not installed.
    """
    _check_installed()
    import zstandard

    found = zstandard.ZstdDecompressor().decompress(data.numpy().tobytes())
    # torch makes no tensor of an empty buffer.
    empty = math.prod(shape) == 0
    flat = torch.empty(0, dtype=dtype) if empty else torch.frombuffer(bytearray(found), dtype=dtype)
    return flat.view(shape)


def _check_installed() -> None:
    check_installed("A compressed cache", "zstandard", "zstandard", extra="zstd")
