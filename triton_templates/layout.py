"""Where a head's channels lie in packed words, as plain numbers that the templates unroll.

*Words* are int16 ``[tokens, W]`` with ``W = D * bits / 16``: bits ``[j*bits, (j+1)*bits)`` of word
``i`` hold the code of channel ``j*W + i`` (*channel plane* ``j``). A tile of words therefore holds
every plane of its tokens. Codes of 3 bits have their low two in ``D / 8`` such words, and their
high ones, planes of one bit, in ``D / 16`` *high words* behind them: the high bits of channel plane
``j`` are planes ``2*j``, for the first half of its words, and ``2*j + 1``.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

# Cache tensors have room for whole tiles of this many tokens. Kernels are told how many of them:
# so the compiler knows what divides the room even where it varies.
CAPACITY_TILE = 128
# Bits of a half's mantissa: that many bits of a word are exact as a subnormal number.
_MANTISSA = 10
# The narrowest operand of a tensor-core product of half-precision numbers.
MIN_LANES = 16
# Fewer words than this in a block would leave most lanes of a tensor-core product unused.
_MIN_BLOCK = 8
_MAX_HEAD_DIM = 256


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
        position: of the code's lowest bit after the shift.
        group: group of channels, if the block lies in one; 0 otherwise.
    """

    index: int
    plane: int
    chunk: int
    channel: int
    shift: int
    mask: int
    position: int
    group: int


@dataclass(frozen=True)
class Layout:
    """One cache tensor as the templates see it.

    Attributes:
        head_dim: channels ``D``.
        bits: 1, 2, 3, 4, 8, or 16 for tokens stored as they are.
        axis: what shares a scale and a minimum: ``group`` consecutive tokens of a ``channel``, or
            ``group`` consecutive channels of a ``token``.
        group: see ``axis``; 0 for 16 bits.
        ring: slots of the window of exact tokens; 0 for 16 bits.
        sliding: the token at position ``t`` is stored at slot ``t % capacity``.
        sinks: first tokens that stay exact, in a tensor of their own; packed tokens come behind
            them, the first at slot 0.
        params: what scales and minima are: ``half``, or ``fp8`` (fp8-e4m3).
        slots: codes of 2 bits have three levels only.
        offline: a scale and a minimum for each channel, which all tokens share; ``group`` is 0.
        joined: KV heads whose channels are one group; ``group`` is then ``head_dim``.
        outliers: elements of a token, of all heads, that are stored as they are.
        codebook: what codes stand for, of a range from -1 to 1; empty if they are evenly spaced.
        midpoints: numbers between which codes change when tokens are encoded.
        rope: first channel, and the one behind the last, that a rotary embedding rotates when keys
            are read; those a half apart are pairs.
        state: the names of the tensors that kernels get, in their order.
        halves: blocks lie in the first or the second half of the words, see `for_encoding`.
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
    rope: tuple[int, int] | None = None
    state: tuple[str, ...] = field(default=("codes", "segment_ends"), repr=False)
    halves: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        if self.identity:
            return "fp"
        bits = 1.5 if self.ternary_in_2bit else self.bits
        kind = "nuq" if self.codebook else "int"
        text = (
            f"{kind}{bits}.{self.axis}{self.group * self.heads_per_group}"
            + ".slots" * self.ternary_in_2bit
        )
        text += ".fp8" * (self.qparams == "fp8") + f".outliers{self.outliers}" * (self.outliers > 0)
        return text + " before their rotary embedding" * (self.rope is not None)

    @property
    def identity(self) -> bool:
        """Tokens are stored as they are."""
        return self.bits == 16

    @property
    def cross_head(self) -> bool:
        """The heads of a token are encoded together, or to levels of a table."""
        return (
            self.static_ranges
            or self.heads_per_group > 1
            or self.outliers > 0
            or bool(self.codebook)
        )

    @property
    def dequant_first(self) -> bool:
        """Attention has to decode: scales and minima cannot be left to its other operands."""
        return self.cross_head or self.rope is not None

    @property
    def segments(self) -> int:
        """Ends of a sequence: of its sinks, where there are some, of what is packed, of all."""
        return 1 if self.identity else 3 if self.sinks else 2

    @property
    def by_channel(self) -> bool:
        """Groups are tokens of a channel."""
        return not self.identity and self.axis == "channel"

    @property
    def max_code(self) -> int:
        """Largest code."""
        return 2 if self.ternary_in_2bit else (1 << self.bits) - 1

    @property
    def plane_bits(self) -> int:
        """Bits of a channel plane."""
        return 2 if self.bits == 3 else self.bits

    @property
    def words(self) -> int:
        """16-bit words that hold one token's codes."""
        return self.head_dim * self.bits // 16

    @property
    def plane_words(self) -> int:
        """Those of them that hold the channel planes: all but the high words."""
        return self.head_dim * self.plane_bits // 16

    @property
    def high_words(self) -> int:
        """Those of them that hold the high bits of codes of 3 bits; 0 for other codes."""
        return self.words - self.plane_words

    @property
    def for_encoding(self) -> Layout:
        """With blocks whose high bits lie in the same lanes of high words, of one plane."""
        return replace(self, halves=self.bits == 3)

    @property
    def row(self) -> int:
        """Words of the longest block."""
        return self.high_words if self.halves else self.plane_words

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a packed token's words and params (16 bits a channel if it is stored as is); its
        outliers, of all heads, are not counted."""
        if self.identity:
            return 2 * self.head_dim
        if self.static_ranges:
            return 2 * self.words
        params = (
            self.head_dim / self.group if self.by_channel else self.groups / self.heads_per_group
        )
        return 2 * self.words + (2 if self.qparams == "fp8" else 4) * params

    @property
    def width(self) -> int:
        """Words of a block: whole rows, or what also divides the groups of channels."""
        if self.identity:
            return self.head_dim
        whole_rows = self.by_channel or self.lanewise
        return self.row if whole_rows else math.gcd(self.group, self.row)

    @property
    def lanewise(self) -> bool:
        """Groups are channels of a token, and blocks that lie in one group would be too short.

        Then blocks are whole rows, and each of their lanes has its own scale.
        """
        short = self.group > 0 and math.gcd(self.group, self.row) < _MIN_BLOCK
        return not self.identity and self.axis == "token" and short

    def groups_of(self, block: Block) -> range:
        """The groups of channels that the block lies in."""
        last = block.channel + self.width - 1
        return range(block.channel // self.group, last // self.group + 1)

    @property
    def group_lanes(self) -> int:
        """`group`, rounded up to a power of two."""
        return _next_power_of_2(self.group)

    @property
    def chunks(self) -> int:
        """Runs of `width` words in a token, of those that hold the channel planes."""
        return self.plane_words // self.width

    @property
    def lanes(self) -> int:
        """`width` rounded up to a power of two that tensor cores take."""
        return max(MIN_LANES, _next_power_of_2(self.width))

    @property
    def padded(self) -> bool:
        """Some lanes of a block hold no channel."""
        return self.lanes != self.width

    @property
    def groups(self) -> int:
        """Groups of channels in a token (1 if groups are tokens of a channel)."""
        return 1 if self.identity or self.by_channel else self.head_dim // self.group

    @property
    def group_columns(self) -> int:
        """`groups`, rounded up to a power of two."""
        return _next_power_of_2(self.groups)

    @property
    def param_rows(self) -> int:
        """`groups`, padded to the rows of a tensor-core product."""
        return max(MIN_LANES, _next_power_of_2(self.groups))

    @property
    def exact_lanes(self) -> int:
        """The channels of an exact token, rounded up to a power of two."""
        return max(MIN_LANES, _next_power_of_2(self.head_dim))

    @property
    def exact_padded(self) -> bool:
        """Some of the `exact_lanes` hold no channel."""
        return self.exact_lanes != self.head_dim

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of a packed token, by chunk, then by plane; none for 16 bits."""
        if self.identity:
            return ()
        bits = self.plane_bits
        per_shift = (_MANTISSA - self.bits) // bits + 1
        made: list[Block] = []
        for chunk in range(self.chunks):
            for plane in range(16 // bits):
                shift = plane // per_shift * per_shift * bits
                position = plane * bits - shift
                channel = plane * self.plane_words + chunk * self.width
                group = 0 if self.by_channel or self.lanewise else channel // self.group
                mask = ((1 << bits) - 1) << position
                made.append(Block(len(made), plane, chunk, channel, shift, mask, position, group))
        return tuple(made)

    @property
    def middle(self) -> int:
        """Half of the highest `Block.position`: what scaled operands are centred on."""
        return max(block.position for block in self.blocks) // 2

    @property
    def level_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The low and the high bytes of `table` in half precision, four to a 32-bit number."""
        halves = struct.pack(f"<{len(self.codebook)}e", *self.codebook)
        low, high = (
            struct.unpack(f"<{len(part) // 4}I", part)
            for part in (halves[start::2].ljust(8, b"\0") for start in (0, 1))
        )
        return low, high

    @property
    def outlier_lanes(self) -> int:
        """`outliers`, rounded up to a power of two."""
        return _next_power_of_2(self.outliers)

    @property
    def rotated(self) -> tuple[tuple[Block, Block], ...]:
        """Pairs of blocks whose channels a rotary embedding turns."""
        if self.rope is None:
            return ()
        start, half = self.rope[0], (self.rope[1] - self.rope[0]) // 2
        by_channel = {b.channel: b for b in self.blocks}
        first = (b for b in self.blocks if start <= b.channel < start + half)
        return tuple((b, by_channel[b.channel + half]) for b in first)

    def unsupported_reason(self) -> str | None:
        """Why the kernels cannot work on this layout, or None."""
        if self.head_dim > _MAX_HEAD_DIM:
            return f"head_dim {self.head_dim} is more than {_MAX_HEAD_DIM}"
        if self.identity:
            return None
        if self.head_dim * self.bits % 16:
            return f"head_dim {self.head_dim} at {self.bits} bits does not fill whole 16-bit words"
        if self.static_ranges:
            pass
        elif self.by_channel:
            if self.group < MIN_LANES or self.group & (self.group - 1):
                return (
                    f"a group of {self.group} tokens is not a power of two of at least {MIN_LANES}"
                )
        elif self.head_dim % self.group:
            return f"group {self.group} does not divide head_dim {self.head_dim}"
        if self.plane_words < _MIN_BLOCK:
            return (
                f"{self} at head_dim {self.head_dim} has {self.plane_words} words a token; the "
                f"kernels need {_MIN_BLOCK}"
            )
        if self.rope is not None:
            start, stop = self.rope
            if self.lanewise or start % self.width or (stop - start) // 2 % self.width:
                return (
                    f"pairs of channels {start} ... {stop} that a rotary embedding turns do not "
                    f"lie in the same lanes of {self.width} words"
                )
        return None


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
