"""How a block of keys or values is stored: the `Codec`, with its encoder and decoder in plain ATen.

Layout (the same on every device, so that kernels and reference exchange bytes):

* *words*, int16 ``[B, H, T, W]`` with ``W = D * bits / 16``: bits ``[j*bits, (j+1)*bits)`` of word
  ``i`` hold the code of channel ``j*W + i`` (a *channel plane* ``j``).
* *params*, int32: ``minimum << 16 | scale``, both IEEE half. Per channel: ``[B, H, T/G, D]``, one
  per group of ``G`` consecutive tokens and channel. Per token: ``[B, H, D/G, T]``, one per token
  and group of ``G`` consecutive channels.

An element decodes to ``code * scale + minimum``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from kvpass.errors import OptionError

Axis = Literal["channel", "token"]
BITS = (2, 4, 8)
_HALF_MAX = torch.finfo(torch.float16).max
_NAME = re.compile(r"int(?P<bits>\d+)\.(?P<axis>channel|token)(?P<group>\d+)")


@dataclass(frozen=True)
class Codec:
    """Uniform asymmetric quantization of groups (KIVI, eq. 1-2), or the identity ``fp``.

    Attributes:
        bits: bits per code, one of 2, 4, 8; 16 is the identity codec, which stores the model's own
        dtype.
        axis: what a group belongs to. ``channel``: ``group`` consecutive tokens of one channel
            (keys in KIVI). ``token``: ``group`` consecutive channels of one token (values in KIVI).
        group: elements that share one scale and one minimum; 0 for the identity.

    Raises:
        OptionError: if bits or group are not allowed.
    """

    bits: int = 16
    axis: Axis = "token"
    group: int = 0

    def __post_init__(self) -> None:
        if self.bits == 16 and self.group == 0:
            return
        if not isinstance(self.bits, int) or self.bits not in BITS:
            raise OptionError(
                f"bits={self.bits!r} is not supported; allowed: 2, 4, 8 (or the recipe 'fp')."
            )
        if self.axis not in ("channel", "token"):
            raise OptionError(f"axis={self.axis!r} is not supported; allowed: 'channel', 'token'.")
        if not isinstance(self.group, int) or self.group < 2:
            raise OptionError(
                f"group={self.group!r} is not supported; allowed: a whole number of at least 2."
            )

    @property
    def identity(self) -> bool:
        """True for ``fp``."""
        return self.bits == 16

    @property
    def token_group(self) -> int:
        """Consecutive tokens that can only be encoded together."""
        return self.group if self.axis == "channel" and not self.identity else 1

    def __str__(self) -> str:
        return "fp" if self.identity else f"int{self.bits}.{self.axis}{self.group}"

    @staticmethod
    @cache
    def parse(text: str) -> Codec:
        """The codec that prints as ``text``, e.g. ``int2.channel32`` or ``fp``."""
        if text == "fp":
            return Codec()
        if match := _NAME.fullmatch(text):
            axis: Axis = "channel" if match["axis"] == "channel" else "token"
            return Codec(int(match["bits"]), axis, int(match["group"]))
        raise OptionError(
            f"Codec {text!r} cannot be read; allowed: 'fp' or e.g. 'int2.channel32', "
            "'int4.token32'."
        )

    def words(self, head_dim: int) -> int:
        """16-bit words that hold one token's codes."""
        return head_dim * self.bits // 16

    def misfit(self, head_dim: int) -> str | None:
        """Why this codec cannot store heads of ``head_dim`` channels, or None."""
        if self.identity:
            return None
        if head_dim * self.bits % 16:
            return f"head_dim {head_dim} at {self.bits} bits does not fill whole 16-bit words"
        if self.axis == "token" and head_dim % self.group:
            return f"group {self.group} does not divide head_dim {head_dim}"
        return None

    def bits_per_element(self) -> float:
        """Stored bits per element, scales and minima included (the identity counts 16)."""
        return 16.0 if self.identity else self.bits + 32 / self.group

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Words and params of ``x``.

        Args:
            x: floating ``[B, H, T, D]``; ``T`` a multiple of `token_group`.

        Returns:
            int16 words ``[B, H, T, W]`` and int32 params (see the module's docstring).
        """
        b, h, t, d = x.shape
        if self.axis == "channel":
            grouped = x.float().reshape(b, h, t // self.group, self.group, d)
            dim = 3
        else:
            grouped = x.float().reshape(b, h, t, d // self.group, self.group)
            dim = 4
        low, high = grouped.aminmax(dim=dim, keepdim=True)
        levels = (1 << self.bits) - 1
        scale, minimum = to_half((high - low) / levels), to_half(low)
        # Codes are chosen against the rounded scale and minimum: those are what decoding will use.
        codes = ((grouped - minimum.float()) / scale.float()).round_().clamp_(0, levels)
        codes = torch.where(scale > 0, codes, 0.0).to(torch.int32).reshape(b, h, t, d)
        params = join_params(scale, minimum).squeeze(dim)
        if self.axis == "token":
            params = params.transpose(2, 3)
        return pack_words(codes, self.bits), params.contiguous()

    def decode(self, words: Tensor, params: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of `encode`: ``[B, H, T, D]`` in ``dtype`` (computed in float32)."""
        codes = unpack_words(words, self.bits)
        scale, minimum = split_params(params)
        b, h, t, d = codes.shape
        if self.axis == "channel":
            grouped = codes.view(b, h, t // self.group, self.group, d)
            out = torch.addcmul(minimum.unsqueeze(3), grouped, scale.unsqueeze(3))
        else:
            grouped = codes.view(b, h, t, d // self.group, self.group)
            out = torch.addcmul(
                minimum.transpose(2, 3).unsqueeze(4), grouped, scale.transpose(2, 3).unsqueeze(4)
            )
        return out.reshape(b, h, t, d).to(dtype)


FP = Codec()


def to_half(x: Tensor) -> Tensor:
    """``x`` rounded to half precision, saturating: an infinite minimum would decode to NaN."""
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def join_params(scale: Tensor, minimum: Tensor) -> Tensor:
    """``minimum << 16 | scale`` as int32, from two half tensors of equal shape."""
    low = scale.view(torch.int16).to(torch.int32) & 0xFFFF
    return (minimum.view(torch.int16).to(torch.int32) << 16) | low


def split_params(params: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum in float32, from the int32 that `join_params` made."""
    # Flat first: a dimension of size one may have any stride, which would refuse the other dtype.
    halves = params.contiguous().view(-1).view(torch.float16).view(*params.shape, 2).float()
    return halves[..., 0], halves[..., 1]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """int16 words ``[..., D*bits/16]`` from int32 codes ``[..., D]``: plane ``j`` is channels
    ``j*W ...``."""
    planes = codes.view(*codes.shape[:-1], 16 // bits, codes.shape[-1] * bits // 16)
    words = planes[..., 0, :].clone()
    for j in range(1, 16 // bits):
        words |= planes[..., j, :] << (j * bits)
    return words.to(torch.int16)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """float32 codes ``[..., D]`` from int16 words; exact inverse of `pack_words`."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=words.device).unsqueeze(-1)
    # An arithmetic shift is enough: the mask removes the copies of the sign bit.
    planes = (words.unsqueeze(-2) >> shifts) & ((1 << bits) - 1)
    return planes.flatten(-2).to(torch.float32)
