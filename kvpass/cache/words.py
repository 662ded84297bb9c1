"""How the codes of a token lie in 16-bit words, in plain ATen.

A token's words stand alone, so that an append writes them without reading its neighbours. With
``W`` words, *plane* ``j`` of word ``i`` holds the code of channel ``j*W + i``:

* 1, 2, 4 and 8 bits: plane ``j`` is bits ``[j*bits, (j+1)*bits)``; ``W = D * bits / 16``.
* 3 bits: two such sets of words, one after the other: ``D / 8`` words with the codes' low two
  bits, then ``D / 16`` words with their high bits.
* 1.5 bits, three levels in base 3: five digits in a byte, since 3^5 = 243 fits into 256. Planes 0
  to 4 are the digits of a word's low byte, the least one first, planes 5 to 9 those of its high
  byte; ``W = ceil(D / 10)``. That is 1.6 bits a code where ten divides ``D``; the places behind
  the last channel hold 0.
* 11 codes in 32 bits (`ELEVENTHS` a code; KVmix, "3-bit quantization"): planes 0 to 9 are bits
  ``[3j, 3j + 3)`` of a 32-bit word and plane 10 is its two highest bits, so that larger codes than
  3 become 3 there. Two sets of ``ceil(D / 11)`` words, the low halves and the high halves. Places
  behind the last channel, which plane 10 has first, hold 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# Bits of a code where 11 of them share 32 bits.
ELEVENTHS = 32 / 11
# Base-3 digits of a byte and of a word.
_BYTE_TRITS, _WORD_TRITS = 5, 10


def word_count(head_dim: int, bits: float) -> int:
    """16-bit words that hold ``head_dim`` codes; only `word_misfit` says whether they are full."""
    if bits == 1.5:
        return -(-head_dim // _WORD_TRITS)
    if bits == ELEVENTHS:
        return 2 * -(-head_dim // 11)
    return int(head_dim * bits) // 16


def word_misfit(head_dim: int, bits: float) -> str | None:
    """Why ``head_dim`` codes cannot be laid out in whole words, or None."""
    if bits not in (1.5, ELEVENTHS) and head_dim * bits % 16:
        return f"head_dim {head_dim} at {bits} bits does not fill whole 16-bit words"
    return None


def saturated(codes: Tensor, bits: float) -> Tensor:
    """Codes ``[..., D]`` as they come back from their words: smaller where there is less room."""
    if bits == ELEVENTHS:
        first = 10 * -(-codes.shape[-1] // 11)
        codes = torch.cat([codes[..., :first], codes[..., first:].clamp(max=3)], dim=-1)
    return codes


def pack_words(codes: Tensor, bits: float) -> Tensor:
    """int16 words ``[..., W]`` from int32 codes ``[..., D]`` that are `saturated`, see the module's
    docstring."""
    if bits == 1.5:
        return _pack_trits(codes)
    if bits == ELEVENTHS:
        return _pack_elevens(codes)
    if bits == 3:
        return torch.cat([pack_words(codes & 3, 2), pack_words(codes >> 2, 1)], dim=-1)
    width = int(bits)
    planes = codes.view(*codes.shape[:-1], 16 // width, codes.shape[-1] * width // 16)
    words = planes[..., 0, :].clone()
    for j in range(1, 16 // width):
        words |= planes[..., j, :] << (j * width)
    return words.to(torch.int16)


def unpack_words(words: Tensor, bits: float) -> Tensor:
    """float32 codes ``[..., D]`` from int16 words; exact inverse of `pack_words`.

    At 1.5 bits codes of all places, ``[..., 10 * W]``, and so with 11 in 32 bits,
    ``[..., 11 * W / 2]``.
    """
    if bits == 1.5:
        return _unpack_trits(words)
    if bits == ELEVENTHS:
        return _unpack_elevens(words)
    if bits == 3:
        low = words.shape[-1] // 3 * 2
        return unpack_words(words[..., :low], 2) + 4 * unpack_words(words[..., low:], 1)
    width = int(bits)
    shifts = torch.arange(0, 16, width, dtype=torch.int16, device=words.device).unsqueeze(-1)
    # An arithmetic shift is enough: the mask removes the copies of the sign bit.
    planes = (words.unsqueeze(-2) >> shifts) & ((1 << width) - 1)
    return planes.flatten(-2).to(torch.float32)


def _pack_elevens(codes: Tensor) -> Tensor:
    count = word_count(codes.shape[-1], ELEVENTHS) // 2
    filled = pad(codes, (0, 11 * count - codes.shape[-1]))
    planes = filled.view(*codes.shape[:-1], 11, count)
    whole = planes[..., 0, :].clone()
    for j in range(1, 11):
        whole |= planes[..., j, :] << 3 * j
    return torch.cat([whole, whole >> 16], dim=-1).to(torch.int16)


def _unpack_elevens(words: Tensor) -> Tensor:
    low, high = (half.to(torch.int32) & 0xFFFF for half in words.chunk(2, dim=-1))
    shifts = torch.arange(0, 33, 3, dtype=torch.int32, device=words.device).unsqueeze(-1)
    planes = ((high << 16 | low).unsqueeze(-2) >> shifts) & 7
    # Plane 10 has two bits; above them are copies of the sign.
    planes[..., 10, :] &= 3
    return planes.flatten(-2).to(torch.float32)


def _pack_trits(codes: Tensor) -> Tensor:
    count = word_count(codes.shape[-1], 1.5)
    filled = pad(codes, (0, count * _WORD_TRITS - codes.shape[-1]))
    planes = filled.view(*codes.shape[:-1], _WORD_TRITS, count)
    words = planes[..., 0, :].clone()
    for j in range(1, _WORD_TRITS):
        byte, digit = divmod(j, _BYTE_TRITS)
        words += planes[..., j, :] * (3**digit << 8 * byte)
    return words.to(torch.int16)


def _unpack_trits(words: Tensor) -> Tensor:
    whole = words.to(torch.int32)
    powers = torch.tensor([3**j for j in range(_BYTE_TRITS)], device=words.device).unsqueeze(-1)
    parts = [(byte.unsqueeze(-2) // powers) % 3 for byte in (whole & 0xFF, (whole >> 8) & 0xFF)]
    return torch.cat(parts, dim=-2).flatten(-2).to(torch.float32)
