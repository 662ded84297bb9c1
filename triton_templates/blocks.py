"""`Block`: channels that a template takes out of a run of words at once."""

from __future__ import annotations

from dataclasses import dataclass

# Bits of a half's mantissa: so many bits of a word are exact as a subnormal number.
_MANTISSA = 10
# The position of what is a number already, not a subnormal one.
_NUMBER = 24
# Of 11 codes in 32 bits: the shift in the lower or, from plane 6 on, the upper half, and the code's
# lowest bit after it. Plane 5 has bits in both.
_PACK11 = (
    (0, 0), (0, 3), (0, 6), (9, 0), (9, 3), (15, 0), (2, 0), (2, 3), (2, 6), (11, 0), (14, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Consecutive channels at one position of consecutive words, in one group of channels.

    Attributes:
        index: position in `Layout.blocks`.
        plane: channel plane.
        chunk: which of the `Layout.chunks` of words.
        channel: first channel.
        shift: right shift after which the plane's bits lie in the mantissa of a half.
        mask: the plane's bits after the shift; ``word >> shift & mask`` is ``code << position``
            (of 3 bits the low two; there is room for the high one).
        position: the code's lowest bit after the shift.
        group: the group of channels that the block lies in; 0 if it lies in several.
        width: channels.
    """

    index: int
    plane: int
    chunk: int
    channel: int
    shift: int
    mask: int
    position: int
    group: int
    width: int


def place_of(plane: int, bits: int) -> tuple[int, int, int]:
    """Shift, mask and position of a plane of codes of so many bits, of 3 bits without the high
    one."""
    plane_bits = 2 if bits == 3 else bits
    # There is room for the high bit.
    per_shift = (_MANTISSA - bits) // plane_bits + 1
    shift = plane // per_shift * per_shift * plane_bits
    position = plane * plane_bits - shift
    return shift, ((1 << plane_bits) - 1) << position, position


def place_of_11(plane: int) -> tuple[int, int, int]:
    """As `place_of`, of a plane of 11 codes in 32 bits."""
    shift, position = _PACK11[plane]
    return shift, (3 if plane == len(_PACK11) - 1 else 7) << position, position


def place_of_digit(plane: int) -> tuple[int, int, int]:
    """As `place_of`, of a digit of base 3, which comes as a number."""
    return 0, 3 << _NUMBER, _NUMBER
