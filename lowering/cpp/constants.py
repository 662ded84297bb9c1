"""What the C++ templates must know of a cache tensor, and reasons to decline one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from kvpass.format.codec import Codec
from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.format.words import TERNARY, WordFormat
from lowering.cpp.structs import (
    ROTARY,
    TOKENS,
    Struct,
    append_struct,
    pack_struct,
    state_struct,
    unpack_struct,
)
from lowering.layouts import (
    decline_calibrated,
    decline_filter,
    decline_groups,
    interpreted,
    unbounded,
)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Constants:
    """One cache tensor as the templates see it.

    Attributes:
        name: the printed plan, without how many tokens it keeps or has room for, and without
            factors of clipping and levels: kernels are told at run time.
        dim: channels of a head.
        words: how codes lie in words; None for tokens stored as they are.
        group: tokens or channels that share a scale; 0 for 16 bits.
        by_token: groups are channels of one token, not tokens of one channel.
        window, flush: see `kvpass.format.retention.Residency`.
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
    words: WordFormat | None
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
    def state(self) -> Struct:
        """The tensors and sizes of a state."""
        return state_struct("StateFields", self.name, "State")

    # The same for all.
    tokens: ClassVar[Struct] = TOKENS
    rotary: ClassVar[Struct] = ROTARY

    @property
    def arguments(self) -> dict[str, Struct]:
        """Of the functions that work on one cache tensor."""
        made = {"pack": pack_struct, "append": append_struct, "unpack": unpack_struct}
        return {op: struct_of(self.name) for op, struct_of in made.items()}

    @property
    def decoded(self) -> bool:
        """Tokens are decoded before they are multiplied, not read as codes."""
        known = self.table or self.outliers or self.rope is not None or self.joined > 1
        return bool(known) or (self.packed and not self.group)

    @property
    def format(self) -> str:
        """How codes lie in words, by its name in C++."""
        assert self.words is not None
        return self.words.struct

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
        return self.words is not None

    @property
    def width(self) -> int:
        """Channels of a plane, whose codes lie side by side; at 16 bits all of them."""
        return self.dim if self.words is None else -(-self.dim // self.words.planes)

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
def constants_of(plan: str, dim: int, encodes: bool = False, segments: int = 1) -> Constants:
    """The constants of a cache tensor with this printed plan and head dimension, to be read only or
    to be written as well; of a state with so many
    ``segments``, see `Constants`."""
    p = parse_plan(plan)
    codec, residency = p.codec, p.residency
    table = None if codec.table is None else tuple(map(float, range(len(codec.table))))
    plain = replace(codec, clip=1.0, table=table, qnorm=None)
    name = str(unbounded(replace(p, codec=plain, rope=None if encodes else p.rope)))
    return Constants(
        name, dim, None if codec.identity else codec.words, codec.group, codec.axis == "token",
        residency.window, residency.flush, p.ring, p.keep is not None,
        codec.levels, codec.params == "fp8", encodes and codec.clip != 1, p.sinks, codec.pairs,
        codec.groups.joined_heads(dim), table is not None, codec.outliers,
        None if encodes else p.rope, residency.ratio if p.grows else None,
        residency.pivotal > 0, segments,
    )  # fmt: skip


def decline_plan(plan: str, dim: int) -> str | None:
    """Why C++ cannot attend to tokens of ``dim`` channels stored so, or None."""
    codec = parse_plan(plan).codec
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
    codec = parse_plan(plan).codec
    return decline_calibrated(plan) or decline_groups(codec, dim) or decline_plan(plan, dim)


def decline_writing(plan: str, dim: int) -> str | None:
    """Why C++ cannot encode tokens of ``dim`` channels so, or None."""
    codec = parse_plan(plan).codec
    if codec.clip != 1 and codec.groups.joined_heads(dim) > 1:
        return f"groups of {codec} that span heads of {dim} are not clipped"
    if codec.groups.joined_heads(dim) > 1 and codec.words is TERNARY:
        return f"base 3 of {codec} is not supported where groups span heads"
    if codec.table is not None and codec.axis == "channel" and not codec.offline:
        return "a table of levels per channel is written in calibrated ranges only"
    return decline_plan(plan, dim)


def address(tensor: Tensor | None) -> int:
    """Of a tensor's memory; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def middles_of(codec: Codec) -> Tensor | None:
    """Halfway between the levels of a table, if there is one."""
    return None if codec.table is None else _floats(codec.middles)


@cache
def levels_of(codec: Codec) -> Tensor | None:
    """The 16 numbers that codes stand for, if they are those of a table."""
    if codec.decoded is None:
        return None
    return _floats((*codec.decoded, *(0.0,) * (16 - len(codec.decoded))))


@cache
def clips_of(codec: Codec, heads: int, dim: int) -> Tensor | None:
    """The factors of clipping, one for each group of channels of ``heads`` of ``dim``, if there are
    any."""
    if codec.clip == 1:
        return None
    count = heads * (dim // codec.group if codec.axis == "token" else 1)
    return _floats(codec.clip if isinstance(codec.clip, tuple) else (codec.clip,) * count)


def _floats(numbers: tuple[float, ...]) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.float32)


def decline_device(x: Tensor) -> str | None:
    """Why C++ cannot work on ``x``, or None."""
    if interpreted():
        return "Triton's interpreter is asked for"
    if x.device.type != "cpu":
        return f"device {x.device.type} is not a CPU"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not supported; C++ takes float32, bfloat16 and float16"
    return None
