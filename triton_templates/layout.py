"""Where a head's channels lie in packed words, as plain numbers that the templates unroll.

*Words* are int16 ``[tokens, W]`` with ``W = D * bits / 16``: bits ``[j*bits, (j+1)*bits)`` of word
``i`` hold the code of channel ``j*W + i`` (*channel plane* ``j``). A tile of words therefore holds
every plane of its tokens. Codes of 3 bits have their low two in ``D / 8`` such words, and their
high ones, planes of one bit, in ``D / 16`` *high words* behind them: the high bits of channel plane
``j`` are planes ``2*j``, for the first half of its words, and ``2*j + 1``. Codes of three values
may be digits of base 3 instead, five in a byte: ten planes, the last of which may be shorter. So
may the last of eleven planes, where 32 bits hold as many codes of 3 bits, whose upper halves are
the high words.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal

from triton_templates.blocks import Block, place_of, place_of_11, place_of_digit

# Cache tensors have room for whole tiles of this many tokens. Kernels get the number of tiles, so
# that the compiler knows what divides the room even where it varies.
CAPACITY_TILE = 128
# The narrowest operand of a tensor-core product of half-precision numbers.
MIN_LANES = 16
# Fewer words than this in a block would leave most lanes of a tensor-core product unused.
_MIN_BLOCK = 8
_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Layout:
    """One cache tensor as the templates see it.

    Attributes:
        head_dim: channels ``D``.
        bits: 1, 2, 3, 4, 8, or 16 for tokens stored as they are.
        axis: what shares a scale and a minimum: ``group`` consecutive tokens of a ``channel``, or
            ``group`` consecutive channels of a ``token``.
        group: see ``axis``; 0 for 16 bits.
        ring: slots of the window of exact tokens; 0 for 16 bits. If it grows, kernels get them.
        sliding: the token at position ``t`` is stored at slot ``t % capacity``.
        sinks: first tokens that stay exact, in a tensor of their own; packed tokens come behind
            them, the first at slot 0.
        qparams: the format of scales and minima, ``half`` or ``fp8`` (fp8-e4m3).
        ternary_in_2bit: codes of 2 bits have three values only.
        ratio: numerator and denominator of the ratio of tokens that stay exact, whose window grows.
        pivotal: that is a ratio of exact tokens, not of all.
        base3: codes of three values are digits of base 3; ``bits`` is 2.
        static_ranges: all tokens share a scale and a minimum for each channel; ``group`` is 0.
        heads_per_group: KV heads whose channels are one group; ``group`` is then ``head_dim``.
        outliers: elements of a token, of all heads, that are stored as they are.
        codebook: numbers from -1 to 1 that codes stand for; empty if they are evenly spaced.
        midpoints: numbers between which codes change when tokens are encoded.
        rope: first channel, and the one behind the last, that a rotary embedding rotates when keys
            are read, and whether pairs are neighbours; else they are a half apart.
        state: the names of the tensors that kernels get, in their order.
        extras: names and counts of what is stored of each token beside words and qparams.
        pack11: codes of 3 bits are 11 in 32 bits; the last is 3 at most.
        half_split: a group is two runs of channels, half a head apart.
        retained: number of the tokens of each head that a filter retains, and its name.
        segment: number and count, where the tokens are one of several segments of a sequence, each
            with a number of tokens of its own side by side; nothing else is exact or packed.
        by_halves: blocks lie in the first or the second half of the words, see `for_encoding`.
    """

    head_dim: int
    bits: int = 16
    axis: Literal["channel", "token"] = "token"
    group: int = 0
    ring: int = 0
    sliding: bool = False
    sinks: int = 0
    qparams: Literal["half", "fp8"] = "half"
    ternary_in_2bit: bool = False
    static_ranges: bool = False
    heads_per_group: int = 1
    outliers: int = 0
    codebook: tuple[float, ...] = ()
    midpoints: tuple[float, ...] = ()
    rope: tuple[int, int, bool] | None = None
    state: tuple[str, ...] = field(default=("codes", "segment_ends"), repr=False)
    extras: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    segment: tuple[int, int] | None = None
    base3: bool = False
    ratio: tuple[int, int] | None = None
    pivotal: bool = False
    pack11: bool = False
    half_split: bool = False
    retained: tuple[int, str] | None = None
    by_halves: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        segment = "" if self.segment is None else "segment {} of {}, ".format(*self.segment)
        if self.identity:
            return segment + "fp"
        kind = "nuq" if self.codebook else "int"
        bits = 1.5 if self.ternary_in_2bit or self.base3 else self.bits
        text = f"{segment}{kind}{bits}.{self.axis}{self.group * self.heads_per_group}"
        text += ".ternary_in_2bit" * self.ternary_in_2bit + ".fp8" * (self.qparams == "fp8")
        text += ".pack11" * self.pack11 + ".half_split" * self.half_split
        text += f".outliers{self.outliers}" * (self.outliers > 0)
        return text + " before their rotary embedding" * (self.rope is not None)

    @property
    def identity(self) -> bool:
        """Whether tokens are stored as they are."""
        return self.bits == 16

    @property
    def cross_head(self) -> bool:
        """Whether a token is encoded at once: its heads belong together, or it needs a codebook."""
        together = self.static_ranges or self.heads_per_group > 1
        return together or self.outliers > 0 or bool(self.codebook)

    @property
    def dequant_first(self) -> bool:
        """Whether attention decodes: scales and minima cannot be left to its other operands."""
        return self.cross_head or self.rope is not None or bool(self.extras)

    @property
    def segments(self) -> int:
        """Segment ends of a sequence: of its sinks, if it has any, of packed tokens, of all; or one
        for each `segment`."""
        if self.segment is not None:
            return self.segment[1]
        return 1 if self.identity else 3 if self.sinks else 2

    @property
    def last_end(self) -> int:
        """The index, among the `segments` ends, of that of all tokens here."""
        return self.segments - 1 if self.segment is None else self.segment[0]

    @property
    def grows(self) -> bool:
        """Whether the window of exact tokens grows with the context."""
        return self.ratio is not None

    @property
    def by_channel(self) -> bool:
        """Whether groups are tokens of a channel."""
        return not self.identity and self.axis == "channel"

    @property
    def max_code(self) -> int:
        """The largest code."""
        return 2 if self.ternary_in_2bit or self.base3 else (1 << self.bits) - 1

    @property
    def plane_bits(self) -> int:
        """Bits of a code in a channel plane."""
        return 2 if self.bits == 3 and not self.pack11 else self.bits

    @property
    def planes(self) -> int:
        """Channel planes."""
        return 10 if self.base3 else 11 if self.pack11 else 16 // self.plane_bits

    @property
    def ragged(self) -> bool:
        """Whether the last channel plane may be shorter than the others."""
        return self.base3 or self.pack11

    @property
    def words(self) -> int:
        """16-bit words that hold one token's codes."""
        if self.ragged:
            return self.plane_words * (2 if self.pack11 else 1)
        return self.head_dim * self.bits // 16

    @property
    def plane_words(self) -> int:
        """`words` that hold the channel planes: all but the high words."""
        return -(-self.head_dim // self.planes)

    @property
    def high_words(self) -> int:
        """`words` that hold the high bits of codes of 3 bits, or with `pack11` the upper halves; 0
        for other codes."""
        return self.words - self.plane_words

    @property
    def for_encoding(self) -> Layout:
        """The layout in blocks whose high bits lie in the same lanes of one plane of high words."""
        return replace(self, by_halves=self.bits == 3 and not self.pack11)

    @property
    def row(self) -> int:
        """Words of the longest block."""
        return self.high_words if self.by_halves else self.plane_words

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a packed token's words and qparams; its outliers, of all heads, not counted."""
        if self.identity or self.static_ranges:
            return 2 * self.words
        groups = self.head_dim / self.group if self.by_channel else self.groups
        return 2 * self.words + (2 if self.qparams == "fp8" else 4) * groups / self.heads_per_group

    @property
    def width(self) -> int:
        """Words of a block: whole rows, or what also divides the groups of channels."""
        whole_rows = self.identity or self.by_channel or self.lanewise or self.ragged
        return self.row if whole_rows else math.gcd(self.run, self.row)

    @property
    def run(self) -> int:
        """Consecutive channels of a group."""
        return self.group // 2 if self.half_split else self.group

    def group_of(self, channel: int) -> int:
        """The group of a channel."""
        return (channel % (self.head_dim // 2) if self.half_split else channel) // self.run

    def channels_of(self, group: int) -> str:
        """In words, the channels of a group."""
        first, last = group * self.run, (group + 1) * self.run - 1
        half = self.head_dim // 2
        return f"{first} ... {last}" + f", {half + first} ... {half + last}" * self.half_split

    @property
    def lanewise(self) -> bool:
        """Whether each lane has its own scale: blocks in one group of a token's channels would be
        too short, so that they are whole rows."""
        short = self.group > 0 and math.gcd(self.run, self.row) < _MIN_BLOCK
        if self.ragged:
            short = self.groups > 1
        return not self.identity and self.axis == "token" and short

    def groups_of(self, block: Block) -> range:
        """The groups of channels that the block lies in."""
        last = block.channel + block.width - 1
        return range(block.channel // self.group, last // self.group + 1)

    @property
    def chunks(self) -> int:
        """Runs of `width` words among the `plane_words` of a token."""
        return self.plane_words // self.width

    @property
    def lanes(self) -> int:
        """`width` rounded up to a power of two that tensor cores take."""
        return max(MIN_LANES, next_power_of_2(self.width))

    @property
    def padded(self) -> bool:
        """Whether some lanes of a block hold no channel."""
        return self.lanes != self.width

    @property
    def groups(self) -> int:
        """Groups of channels in a token (1 if groups are tokens of a channel)."""
        return 1 if self.identity or self.by_channel else self.head_dim // self.group

    @property
    def exact_lanes(self) -> int:
        """The channels of an exact token, rounded up to a power of two."""
        return max(MIN_LANES, next_power_of_2(self.head_dim))

    @property
    def exact_padded(self) -> bool:
        """Whether some of the `exact_lanes` hold no channel."""
        return self.exact_lanes != self.head_dim

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of a packed token, by chunk, then by plane; none for 16 bits."""
        made: list[Block] = []
        for chunk, plane in product(range(0 if self.identity else self.chunks), range(self.planes)):
            channel = plane * self.plane_words + chunk * self.width
            # The last of ragged planes may have no channel at all.
            if channel >= self.head_dim:
                continue
            group = 0 if self.by_channel or self.lanewise else self.group_of(channel)
            width = min(self.width, self.head_dim - channel)
            place = self._place(plane)
            made.append(Block(len(made), plane, chunk, channel, *place, group, width))
        return tuple(made)

    def _place(self, plane: int) -> tuple[int, int, int]:
        """Shift, mask and position of a plane's blocks."""
        if self.base3:
            return place_of_digit(plane)
        return place_of_11(plane) if self.pack11 else place_of(plane, self.bits)

    @property
    def middle(self) -> int:
        """Half of the highest `Block.position`, on which scaled operands are centred."""
        return 24 if self.base3 else max(block.position for block in self.blocks) // 2

    @property
    def codebook_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The low and the high bytes of `codebook` in half precision, four to a 32-bit number."""
        halves = struct.pack(f"<{len(self.codebook)}e", *self.codebook)
        low, high = (halves[start::2].ljust(8, b"\0") for start in (0, 1))
        return struct.unpack(f"<{len(low) // 4}I", low), struct.unpack(f"<{len(high) // 4}I", high)

    @property
    def rotary_pairs(self) -> tuple[tuple[Block, Block], ...]:
        """Pairs of blocks whose channels a rotary embedding rotates together, lane by lane."""
        if self.rope is None or self.rope[2]:
            return ()
        start, half = self.rope[0], (self.rope[1] - self.rope[0]) // 2
        by_channel = {b.channel: b for b in self.blocks}
        first = (b for b in self.blocks if start <= b.channel < start + half)
        return tuple((b, by_channel[b.channel + half]) for b in first)

    def rotated_lanes(self, block: Block) -> range:
        """The lanes of a block that a rotary embedding of neighbours rotates."""
        if self.rope is None or not self.rope[2]:
            return range(0)
        first, last = self.rope[0] - block.channel, self.rope[1] - block.channel
        return range(max(first, 0), max(min(last, block.width), 0))

    def unsupported_reason(self) -> str | None:
        """Why the kernels cannot work on this layout, or None."""
        if self.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {self.head_dim} is more than {_MAX_HEAD_DIM}"
        if self.grows and self.cross_head:
            return f"a window that grows is not supported where heads are encoded together ({self})"
        if self.identity:
            return None
        if self.retained is not None and self.dequant_first:
            return f"retained tokens are not supported where {self} is decoded"
        if self.half_split and (self.lanewise or self.cross_head):
            return f"the halves of the groups of {self} do not fill blocks of {_MIN_BLOCK} words"
        if self.ragged and self.dequant_first:
            return f"{self} is not supported where tokens have to be decoded"
        if not self.ragged and self.head_dim * self.bits % 16:
            return f"head_dim {self.head_dim} at {self.bits} bits does not fill whole 16-bit words"
        group = self.group
        if self.by_channel and not self.static_ranges:
            if group < MIN_LANES or group != next_power_of_2(group):
                return f"a group of {group} tokens is not a power of two of at least {MIN_LANES}"
        elif self.codebook and not self.static_ranges and group < self.head_dim:
            return f"a codebook is written in groups of whole heads, not of {group} channels"
        elif not self.static_ranges and self.head_dim % group:
            return f"group {group} does not divide head_dim {self.head_dim}"
        if self.plane_words < _MIN_BLOCK and not self.ragged:
            return (
                f"{self} at head_dim {self.head_dim} has {self.plane_words} words a token; the "
                f"kernels need {_MIN_BLOCK}"
            )
        if self.rope is not None:
            start, stop, neighbours = self.rope
            if neighbours:
                if start % 2 or self.width % 2:
                    return f"neighbours from channel {start} on do not share {self.width} words"
            elif self.lanewise or start % self.width or (stop - start) // 2 % self.width:
                return (
                    f"pairs of channels {start} ... {stop} that a rotary embedding rotates do not "
                    f"lie in the same lanes of {self.width} words"
                )
        return None


def next_power_of_2(n: int) -> int:
    """``n``, which is positive, rounded up to a power of two."""
    return 1 << (n - 1).bit_length()
