"""What the C++ templates must know of a cache tensor, and reasons to decline one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.codec import Codec
from kvpass.cache.rope import Rope
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.cache.words import ELEVENTHS
from lowering.layouts import (
    decline_calibrated,
    decline_filter,
    decline_groups,
    decline_levels,
    interpreted,
    unbounded,
)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


_STATE = struct.Struct("4P3q")
# Planes and C++ formats of words that do not hold one run of bits per code, by the bits of a code.
_FORMATS = {1.5: (10, "Trits"), ELEVENTHS: (11, "Elevens"), 3: (16, "ThreeBits")}


@dataclass(frozen=True)
class Constants:
    """One cache tensor as the templates see it.

    Attributes:
        name: the printed plan, without how many tokens it keeps or has room for, and without
            factors of clipping and levels: kernels are told at run time.
        dim: channels of a head.
        bits: of a code in its words; 1.5 for base 3, `ELEVENTHS`, 16 for tokens stored as they are.
        group: tokens or channels that share a scale; 0 for 16 bits.
        by_token: groups are channels of one token, not tokens of one channel.
        window, flush: see `kvpass.cache.residency.Residency`.
        ring: slots of the exact window; 0 for 16 bits. Where a ratio of the tokens stays exact,
            kernels are told at run time.
        sliding: the token at position ``t`` is stored at slot ``t % capacity``.
        levels: the largest code.
        fp8: scales and minima are fp8-e4m3, not half.
        clipped: the ends of groups are multiplied by a factor.
        sinks: first tokens that are stored as they are, beside the window.
        pairs: a group of channels is two runs, half a head apart.
        joined: heads that a group spans.
        table: codes are levels of a table, which kernels are told at run time.
        outliers: elements of a token that are stored as they are.
        rope: keys are turned when they are read.
        ratio: of the tokens that stay exact, numerator and denominator; None if they are `window`.
        pivotal: that ratio is of the exact tokens, not of all.
        segments: of chunks of different bits: tokens stored as they are have the last end.
    """

    name: str
    dim: int
    bits: float
    group: int
    by_token: bool
    window: int
    flush: int
    ring: int
    sliding: bool = False
    # Said by the name already.
    levels: int = field(default=0, repr=False)
    fp8: bool = field(default=False, repr=False)
    clipped: bool = field(default=False, repr=False)
    sinks: int = field(default=0, repr=False)
    pairs: bool = field(default=False, repr=False)
    joined: int = field(default=1, repr=False)
    table: bool = field(default=False, repr=False)
    outliers: int = field(default=0, repr=False)
    rope: Rope | None = field(default=None, repr=False)
    ratio: tuple[int, int] | None = field(default=None, repr=False)
    pivotal: bool = field(default=False, repr=False)
    segments: int = field(default=1, repr=False)

    @property
    def decoded(self) -> bool:
        """Tokens are decoded before they are multiplied, not read as codes."""
        known = self.table or self.outliers or self.rope is not None or self.joined > 1
        return bool(known) or (self.packed and not self.group)

    @property
    def format(self) -> str:
        """How codes lie in words, by its name in C++."""
        return _FORMATS[self.bits][1] if self.bits in _FORMATS else f"Bits<{self.bits}>"

    @property
    def param(self) -> str:
        """The type of params."""
        return "int16_t" if self.fp8 else "int32_t"

    @property
    def param_bits(self) -> int:
        """Of each of the two numbers in params."""
        return 8 if self.fp8 else 16

    @property
    def widen(self) -> str:
        """The function that reads one of them."""
        return "widen_fp8" if self.fp8 else "widen_half"

    @property
    def period(self) -> int:
        """Channels after which groups of channels begin again."""
        return self.dim // 2 if self.pairs else self.dim

    @property
    def run(self) -> int:
        """Channels of a group that lie side by side in a head."""
        return self.group // 2 if self.pairs else min(self.group, self.dim)

    @property
    def packed(self) -> bool:
        """Tokens are stored as codes."""
        return self.bits != 16

    @property
    def width(self) -> int:
        """Channels of a plane, whose codes lie side by side; at 16 bits all of them."""
        if not self.packed:
            return self.dim
        planes = _FORMATS[self.bits][0] if self.bits in _FORMATS else 16 // int(self.bits)
        return -(-self.dim // planes)

    def misfit(self, lanes: int) -> str | None:
        """Why vectors of ``lanes`` numbers cannot work on these groups, or None."""
        if self.packed and self.by_token:
            for plane in range(0, self.dim, self.width):
                for first in range(plane, plane + self.width, lanes):
                    last = min(first + lanes, plane + self.width) - 1
                    if last // self.run - first // self.run > 1:
                        return f"groups of {self.group} channels are too small for {lanes} lanes"
        return None


@cache
def constants_of(plan: str, dim: int, encodes: bool = False) -> Constants:
    """The constants of a cache tensor with this printed plan and head dimension, to be read only or
    to be written as well."""
    p = TensorPlan.parse(plan)
    codec, residency = p.codec, p.residency
    table = None if codec.table is None else tuple(map(float, range(len(codec.table))))
    plain = replace(codec, clip=1.0, table=table, qnorm=None)
    alone = replace(p, levels=(), chunk=0)
    name = str(unbounded(replace(alone, codec=plain, rope=None if encodes else p.rope)))
    return Constants(
        name, dim, codec.word_bits, codec.group, codec.axis == "token",
        residency.window, residency.flush, p.ring, p.keep is not None,
        codec.levels, codec.params == "fp8", encodes and codec.clip != 1, p.sinks, codec.pairs,
        codec.groups.joined_heads(dim), table is not None, codec.outliers,
        None if encodes else p.rope, residency.ratio if p.grows else None,
        residency.pivotal > 0, len(p.levels) + 1,
    )  # fmt: skip


def decline_plan(plan: str, dim: int) -> str | None:
    """Why C++ cannot attend to tokens of ``dim`` channels stored so, or None."""
    codec = TensorPlan.parse(plan).codec
    if codec.sizes is not None:
        return f"sizes of {codec} are not supported"
    if reason := decline_filter(plan):
        return reason
    constants = constants_of(plan, dim)
    if constants.pairs and constants.period % constants.width:
        return f"pairs of {plan} do not fill planes of {constants.width} channels"
    return None


def decline_reading(plan: str, dim: int) -> str | None:
    """Why C++ cannot decode tokens of ``dim`` channels stored so, or None."""
    codec = TensorPlan.parse(plan).codec
    return (
        decline_levels(plan)
        or decline_calibrated(plan)
        or decline_groups(codec, dim)
        or decline_plan(plan, dim)
    )


def decline_writing(plan: str, dim: int) -> str | None:
    """Why C++ cannot encode tokens of ``dim`` channels so, or None."""
    codec = TensorPlan.parse(plan).codec
    if codec.clip != 1 and codec.groups.joined_heads(dim) > 1:
        return f"groups of {codec} that span heads of {dim} are not clipped"
    if codec.word_bits == 1.5 and codec.groups.joined_heads(dim) > 1:
        return f"base 3 of {codec} is not supported where groups span heads"
    if codec.table is not None and codec.axis == "channel" and not codec.offline:
        return "a table of levels per channel is written in calibrated ranges only"
    return decline_plan(plan, dim)


def middle_argument(plan: str) -> bytes:
    """Where the numbers halfway between the levels of a table are, if there is one."""
    middles = _middles(TensorPlan.parse(plan).codec)
    return b"" if middles is None else struct.pack("P", middles.data_ptr())


@cache
def _middles(codec: Codec) -> Tensor | None:
    if codec.table is None:
        return None
    with torch.inference_mode(False):
        return torch.tensor(codec.middles)


def level_argument(plan: str) -> bytes:
    """Where the 16 numbers that codes stand for are, if they are those of a table."""
    levels = _levels(TensorPlan.parse(plan).codec)
    return b"" if levels is None else struct.pack("P", levels.data_ptr())


@cache
def _levels(codec: Codec) -> Tensor | None:
    if codec.decoded is None:
        return None
    with torch.inference_mode(False):
        levels = torch.zeros(16)
        levels[: len(codec.decoded)] = torch.tensor(codec.decoded)
        return levels


def clip_argument(plan: str, heads: int, dim: int) -> bytes:
    """One of the last arguments of what encodes: where the factors of clipping are, one for each
    group of channels of ``heads`` of ``dim``, if there are any."""
    factors = _clips(plan, heads, dim)
    return b"" if factors is None else struct.pack("P", factors.data_ptr())


@cache
def _clips(plan: str, heads: int, dim: int) -> Tensor | None:
    codec = TensorPlan.parse(plan).codec
    if codec.clip == 1:
        return None
    count = heads * (dim // codec.group if codec.axis == "token" else 1)
    each = codec.clip if isinstance(codec.clip, tuple) else (codec.clip,) * count
    with torch.inference_mode(False):
        return torch.tensor(each, dtype=torch.float32)


def sinks_argument(state: Sequence[Tensor], plan: str) -> bytes:
    """The last argument for a cache tensor: the address of its sinks, where it has any."""
    return struct.pack("P", state[3].data_ptr()) if TensorPlan.parse(plan).sinks else b""


def outlier_argument(state: Sequence[Tensor], plan: str) -> bytes:
    """The address of its outliers, where it has any."""
    p = TensorPlan.parse(plan)
    if not p.codec.outliers:
        return b""
    return struct.pack("P", state[p.state_names.index("outliers")].data_ptr())


def rotary_argument(state: Sequence[Tensor], plan: str) -> bytes:
    """Address, stride of the batch, and capacity of the cosines and sines of its tokens, where they
    are needed."""
    if TensorPlan.parse(plan).rope is None:
        return b""
    rotary = state[-2]
    stride = rotary.stride(0) if rotary.shape[0] > 1 else 0
    return struct.pack("P2q", rotary.data_ptr(), stride, rotary.shape[1])


def decline_device(x: Tensor) -> str | None:
    """Why C++ cannot work on ``x``, or None."""
    if interpreted():
        return "Triton's interpreter is asked for"
    if x.device.type != "cpu":
        return f"device {x.device.type} is not a CPU"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not supported; C++ takes float32, bfloat16 and float16"
    return None


def state_argument(state: Sequence[Tensor], plan: str) -> bytes:
    """One cache tensor ``[batch, heads, ...]`` as ``State`` in ``_encode.h.jinja``."""
    batch, heads, capacity = state[0].shape[:3]
    return _STATE.pack(*pointers(state, plan), batch, heads, capacity) + ring_argument(state, plan)


def ring_argument(state: Sequence[Tensor], plan: str) -> bytes:
    """The slots of the exact window, where a ratio of the tokens stays exact."""
    return struct.pack("q", state[2].shape[2]) if TensorPlan.parse(plan).grows else b""


def pointers(state: Sequence[Tensor], plan: str) -> tuple[int, int, int, int]:
    """Addresses of codes, params, window and ends; 0 for what an identity codec lacks. See also
    `sinks_argument`."""
    if TensorPlan.parse(plan).codec.identity:
        return state[0].data_ptr(), 0, 0, state[-1].data_ptr()
    codes, params, window = state[:3]
    return codes.data_ptr(), params.data_ptr(), window.data_ptr(), state[-1].data_ptr()
