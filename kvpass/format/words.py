"""`WordFormat`: how the codes of a token lie in 16-bit words, in plain ATen.

A token's words stand alone, so that an append writes them without reading its neighbours. With
``W`` words, *plane* ``j`` of word ``i`` holds the code of channel ``j*W + i``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class WordFormat(ABC):
    """One layout of codes in words.

    Attributes:
        struct: its name in ``lowering/cpp``.
        bits: of a code; where words have places to spare, of a code in full words.
        planes: runs of consecutive channels that a token's words hold, one code of each in a word.
    """

    struct: str
    bits: float
    planes: int

    def count(self, head_dim: int) -> int:
        """16-bit words that hold ``head_dim`` codes."""
        return int(head_dim * self.bits) // 16

    def unsupported_reason(self, head_dim: int) -> str | None:
        """Why ``head_dim`` codes cannot be laid out in whole words, or None."""
        if head_dim * self.bits % 16:
            return f"head_dim {head_dim} at {self.bits} bits does not fill whole 16-bit words"
        return None

    def saturated(self, codes: Tensor) -> Tensor:
        """Codes ``[..., D]`` as they come back from their words: smaller where there is less
        room."""
        return codes

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """int16 words ``[..., W]`` from int32 codes ``[..., D]`` that are `saturated`."""

    @abstractmethod
    def unpack(self, words: Tensor) -> Tensor:
        """float32 codes from int16 words ``[..., W]``; exact inverse of `pack`, with the codes of
        spare places, which are 0, behind those of the last channel."""


class Planes(WordFormat):
    """1, 2, 4 and 8 bits: plane ``j`` is bits ``[j*bits, (j+1)*bits)``; ``W = D * bits / 16``."""

    def __init__(self, bits: int) -> None:
        super().__init__(f"Bits<{bits}>", bits, 16 // bits)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        width = int(self.bits)
        planes = codes.view(*codes.shape[:-1], self.planes, codes.shape[-1] // self.planes)
        return _joined(planes, range(0, 16, width)).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        width = int(self.bits)
        shifts = torch.arange(0, 16, width, dtype=torch.int16, device=words.device).unsqueeze(-1)
        # An arithmetic shift is enough: the mask removes the copies of the sign bit.
        planes = (words.unsqueeze(-2) >> shifts) & ((1 << width) - 1)
        return planes.flatten(-2).to(torch.float32)


class LowHigh(WordFormat):
    """3 bits: two sets of `Planes`, one after the other: ``D / 8`` words with the codes' low two
    bits, then ``D / 16`` words with their high bits."""

    def __init__(self) -> None:
        super().__init__("ThreeBits", 3, 16)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        return torch.cat([Planes(2).pack(codes & 3), Planes(1).pack(codes >> 2)], dim=-1)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        low = words.shape[-1] // 3 * 2
        return Planes(2).unpack(words[..., :low]) + 4 * Planes(1).unpack(words[..., low:])


class Ternary(WordFormat):
    """1.5 bits, three levels in base 3: five digits in a byte, since 3^5 = 243 fits into 256.

    Planes 0 to 4 are the digits of a word's low byte, the least one first, planes 5 to 9 those of
    its high byte; ``W = ceil(D / 10)``. That is 1.6 bits a code where ten divides ``D``.
    """

    _DIGITS = 5

    def __init__(self) -> None:
        super().__init__("Ternary", 1.6, 2 * self._DIGITS)

    def count(self, head_dim: int) -> int:
        """See `WordFormat.count`."""
        return -(-head_dim // self.planes)

    def unsupported_reason(self, head_dim: int) -> str | None:
        """None: the last word may have places to spare."""
        return None

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        powers = [3**digit << 8 * byte for byte in range(2) for digit in range(self._DIGITS)]
        scale = torch.tensor(powers, dtype=torch.int32, device=codes.device).unsqueeze(-1)
        words = (_filled(codes, self.planes) * scale).sum(-2, dtype=torch.int32)
        return words.to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        whole = words.to(torch.int32)
        powers = [3**digit for digit in range(self._DIGITS)]
        divisors = torch.tensor(powers, device=words.device).unsqueeze(-1)
        parts = [(x.unsqueeze(-2) // divisors) % 3 for x in (whole & 0xFF, (whole >> 8) & 0xFF)]
        return torch.cat(parts, dim=-2).flatten(-2).to(torch.float32)


class Pack11(WordFormat):
    """11 codes of 3 bits in 32 bits (KVmix, "3-bit quantization").

    Planes 0 to 9 are bits ``[3j, 3j + 3)`` of a 32-bit word and plane 10 is its two highest bits,
    so that larger codes than 3 become 3 there. Two sets of ``ceil(D / 11)`` words, the low halves
    and the high halves.
    """

    def __init__(self) -> None:
        super().__init__("Pack11", 32 / 11, 11)

    def count(self, head_dim: int) -> int:
        """See `WordFormat.count`."""
        return 2 * -(-head_dim // self.planes)

    def unsupported_reason(self, head_dim: int) -> str | None:
        """None: plane 10 may have places to spare."""
        return None

    def saturated(self, codes: Tensor) -> Tensor:
        """See `WordFormat.saturated`."""
        first = 10 * self.count(codes.shape[-1]) // 2
        return torch.cat([codes[..., :first], codes[..., first:].clamp(max=3)], dim=-1)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        whole = _joined(_filled(codes, self.planes), range(0, 33, 3))
        return torch.cat([whole, whole >> 16], dim=-1).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        low, high = (half.to(torch.int32) & 0xFFFF for half in words.chunk(2, dim=-1))
        shifts = torch.arange(0, 33, 3, dtype=torch.int32, device=words.device).unsqueeze(-1)
        planes = ((high << 16 | low).unsqueeze(-2) >> shifts) & 7
        # Plane 10 has two bits; above them are copies of the sign.
        planes[..., 10, :] &= 3
        return planes.flatten(-2).to(torch.float32)


TERNARY, PACK11 = Ternary(), Pack11()
# By the bits of a code that fills as many in a word.
BY_BITS: dict[float, WordFormat] = {n: Planes(n) for n in (1, 2, 4, 8)} | {3: LowHigh()}


def _filled(codes: Tensor, planes: int) -> Tensor:
    """Codes ``[..., D]`` as ``[..., planes, ceil(D / planes)]``, 0 in spare places."""
    count = -(-codes.shape[-1] // planes)
    filled = pad(codes, (0, planes * count - codes.shape[-1]))
    return filled.view(*codes.shape[:-1], planes, count)


def _joined(planes: Tensor, shifts: range) -> Tensor:
    """int32 ``[..., W]`` with plane ``j`` of ``[..., planes, W]`` shifted left by ``shifts[j]``."""
    words = planes[..., 0, :].clone()
    for j, shift in enumerate(shifts):
        words |= planes[..., j, :] << shift
    return words
