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
        planes: runs of consecutive channels that a token's words hold, one code of each in a word.
        parts: words that share the code of each plane.
        padded: the last words may have spare slots.
    """

    struct: str
    planes: int
    parts: int = 1
    padded: bool = False

    @property
    def bits(self) -> float:
        """Bits of a code, in words without spare slots."""
        return 16 * self.parts / self.planes

    def count(self, head_dim: int) -> int:
        """16-bit words that hold ``head_dim`` codes."""
        return self.parts * -(-head_dim // self.planes)

    def unsupported_reason(self, head_dim: int) -> str | None:
        """Why ``head_dim`` codes cannot be laid out in whole words, or None."""
        if head_dim % self.planes and not self.padded:
            return f"head_dim {head_dim} at {self.bits:g} bits does not fill whole 16-bit words"
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
        spare slots, which are 0, behind those of the last channel."""


class Planes(WordFormat):
    """1, 2, 4 and 8 bits: plane ``j`` is bits ``[j*bits, (j+1)*bits)``; ``W = D * bits / 16``."""

    def __init__(self, bits: int) -> None:
        super().__init__(f"Bits<{bits}>", 16 // bits)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        return _shifted(_planes(codes, self.planes), 16 // self.planes).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        return _split(words, 16 // self.planes, self.planes).flatten(-2).float()


class LowHigh(WordFormat):
    """3 bits: two sets of `Planes`, one after the other: ``D / 8`` words with the codes' low two
    bits, then ``D / 16`` words with their high bits."""

    def __init__(self) -> None:
        super().__init__("ThreeBits", 16, parts=3)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        return torch.cat([Planes(2).pack(codes & 3), Planes(1).pack(codes >> 2)], dim=-1)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        low = words.shape[-1] // 3 * 2
        return Planes(2).unpack(words[..., :low]) + 4 * Planes(1).unpack(words[..., low:])


class Ternary(WordFormat):
    """1.5 bits, three values in base 3: five digits in a byte, since 3^5 = 243 fits into 256.

    Planes 0 to 4 are the digits of a word's low byte, the lowest one first, planes 5 to 9 those of
    its high byte; ``W = ceil(D / 10)``. That is 1.6 bits a code where ten divides ``D``.
    """

    def __init__(self) -> None:
        super().__init__("Ternary", 10, padded=True)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        powers = _powers_of_3(codes.device)
        digits = _planes(codes, self.planes) * torch.cat([powers, powers << 8])
        return digits.sum(-2, dtype=torch.int32).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        digits = _split(words, 8, 2).unsqueeze(-2) // _powers_of_3(words.device) % 3
        return digits.flatten(-3).float()


class Pack11(WordFormat):
    """11 codes of 3 bits in 32 bits (KVmix, "3-bit quantization").

    Planes 0 to 9 are bits ``[3j, 3j + 3)`` of a 32-bit word and plane 10 is its two highest bits,
    so that larger codes than 3 become 3 there. Two sets of ``ceil(D / 11)`` words, the low halves
    and the high halves.
    """

    def __init__(self) -> None:
        super().__init__("Pack11", 11, parts=2, padded=True)

    def saturated(self, codes: Tensor) -> Tensor:
        """See `WordFormat.saturated`."""
        first = 10 * self.count(codes.shape[-1]) // 2
        return torch.cat([codes[..., :first], codes[..., first:].clamp(max=3)], dim=-1)

    def pack(self, codes: Tensor) -> Tensor:
        """See `WordFormat.pack`."""
        both = _shifted(_planes(codes, self.planes), 3)
        return torch.cat([both, both >> 16], dim=-1).to(torch.int16)

    def unpack(self, words: Tensor) -> Tensor:
        """See `WordFormat.unpack`."""
        low, high = (half.to(torch.int32) & 0xFFFF for half in words.chunk(2, dim=-1))
        planes = _split(high << 16 | low, 3, self.planes)
        # Plane 10 has two bits; above them are copies of the sign.
        planes[..., 10, :] &= 3
        return planes.flatten(-2).float()


TERNARY, PACK11 = Ternary(), Pack11()
# By the bits of a code that fills as many in a word.
BY_BITS: dict[float, WordFormat] = {n: Planes(n) for n in (1, 2, 4, 8)} | {3: LowHigh()}


def _planes(codes: Tensor, planes: int) -> Tensor:
    """Codes ``[..., D]`` as ``[..., planes, ceil(D / planes)]``, 0 in spare slots."""
    count = -(-codes.shape[-1] // planes)
    filled = pad(codes, (0, planes * count - codes.shape[-1]))
    return filled.view(*codes.shape[:-1], planes, count)


def _shifted(planes: Tensor, bits: int) -> Tensor:
    """int32 ``[..., W]`` with plane ``j`` of ``[..., planes, W]`` shifted left by ``j * bits``."""
    words = planes[..., 0, :].clone()
    for j in range(1, planes.shape[-2]):
        words |= planes[..., j, :] << j * bits
    return words


def _split(words: Tensor, bits: int, planes: int) -> Tensor:
    """Inverse of `_shifted`. An arithmetic shift will do: the mask removes copies of the sign."""
    shifts = torch.arange(0, planes * bits, bits, dtype=words.dtype, device=words.device)
    return (words.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << bits) - 1)


def _powers_of_3(device: torch.device) -> Tensor:
    return torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32, device=device).unsqueeze(-1)
