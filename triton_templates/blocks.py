"""`Block`: channels that a template takes out of a run of words at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton_templates.layout import Layout

# Bits of a half's mantissa: so many bits of a word are exact as a subnormal number.
_MANTISSA = 10
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


def blocks_of(x: Layout) -> Iterator[Block]:
    """The blocks of a packed token, by chunk, then by plane."""
    index = 0
    for chunk in range(x.chunks):
        for plane in range(x.planes):
            channel = plane * x.plane_words + chunk * x.width
            # The last plane of eleven may have no channel at all.
            if channel < x.head_dim or x.base3:
                group = 0 if x.by_channel or x.lanewise else channel // x.group
                width = min(x.width, x.head_dim - channel)
                yield Block(index, plane, chunk, channel, *_place(x, plane), group, width)
                index += 1


def _place(x: Layout, plane: int) -> tuple[int, int, int]:
    """Shift, mask and position of a plane's blocks."""
    bits = x.plane_bits
    if x.pack11:
        shift, position = _PACK11[plane]
        bits = 2 if plane == x.planes - 1 else bits
    else:
        # There is room for the high bit of a code of 3 bits.
        per_shift = (_MANTISSA - x.bits) // bits + 1
        shift = plane // per_shift * per_shift * bits
        # Digits of base 3 come as numbers.
        position = 24 if x.base3 else plane * bits - shift
    return shift, ((1 << bits) - 1) << position, position
