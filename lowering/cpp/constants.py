"""What the C++ templates must know of a cache tensor, and reasons to decline one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.residency import TensorPlan
from lowering.layouts import interpreted, unbounded

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Part:
    """Words that hold some bits of every code of a token.

    Attributes:
        bits: of each code.
        shift: place in the code of the lowest of them.
        name: of the part's namespace; empty where it is the only one.
    """

    bits: int
    shift: int = 0
    name: str = ""

    @property
    def mask(self) -> int:
        """Its bits, shifted down."""
        return (1 << self.bits) - 1

    @property
    def scope(self) -> str:
        """What stands before the names of its namespace."""
        return self.name and f"{self.name}::"

    @property
    def prefix(self) -> str:
        """What stands before the names of its members."""
        return self.name and f"{self.name}_"


@dataclass(frozen=True)
class Constants:
    """One cache tensor as the templates see it.

    Attributes:
        name: the printed plan, without how many tokens it keeps or has room for, and without the
            factor of clipping: kernels are told at run time.
        dim: channels of a head.
        bits: of the place of a code in its words; 16 for tokens stored as they are.
        group: tokens or channels that share a scale; 0 for 16 bits.
        by_token: groups are channels of one token, not tokens of one channel.
        window, flush: see `kvpass.cache.residency.Residency`.
        ring: slots of the exact window; 0 for 16 bits.
        sliding: the token at position ``t`` is stored at slot ``t % capacity``.
        levels: the largest code.
        fp8: scales and minima are fp8-e4m3, not half.
        clipped: the ends of groups are multiplied by a factor.
        sinks: first tokens that are stored as they are, beside the window.
    """

    name: str
    dim: int
    bits: int
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

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of their words, see `kvpass.cache.words`; none for 16 bits."""
        if self.bits == 3:
            return Part(2, 0, "low"), Part(1, 2, "high")
        return (Part(self.bits),) if self.packed else ()

    @property
    def stride(self) -> str:
        """The words of a token, where there is one cache tensor."""
        return "TOKEN_WORDS" if self.bits == 3 else "Code::WORDS"

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
    def packed(self) -> bool:
        """Tokens are stored as codes."""
        return self.bits != 16

    @property
    def words(self) -> int:
        """Numbers of one token that lie side by side: 16-bit words of a plane, or channels."""
        return self.dim * (self.parts[0].bits if self.packed else 16) // 16

    def misfit(self, lanes: int) -> str | None:
        """Why vectors of ``lanes`` numbers cannot work on these groups, or None."""
        if not (self.packed and self.by_token):
            return None
        if any(self._misfit(lanes, self.dim * part.bits // 16) for part in self.parts):
            return f"groups of {self.group} channels are too small for {lanes} lanes"
        return None

    def _misfit(self, lanes: int, words: int) -> bool:
        """A vector of channels in planes of ``words`` channels lies in more than two groups."""
        for first in range(0, words, lanes):
            last = min(first + lanes, words) - 1
            for plane in range(0, self.dim, words):
                if (plane + last) // self.group - (plane + first) // self.group > 1:
                    return True
        return False


@cache
def constants_of(plan: str, dim: int, encodes: bool = False) -> Constants:
    """The constants of a cache tensor with this printed plan and head dimension, to be read only or
    to be written as well."""
    p = TensorPlan.parse(plan)
    codec, residency = p.codec, p.residency
    name = str(unbounded(replace(p, codec=replace(codec, clip=1.0))))
    return Constants(
        name, dim, int(codec.word_bits), codec.group, codec.axis == "token",
        residency.window, residency.flush, p.ring, p.keep is not None,
        codec.levels, codec.params == "fp8", encodes and codec.clip != 1, p.sinks,
    )  # fmt: skip


def decline_plan(plan: str) -> str | None:
    """Why C++ cannot work on tokens stored so, or None."""
    p = TensorPlan.parse(plan)
    if p.codec.word_bits == 1.5:
        return f"base 3 of {p.codec} is not supported; C++ takes its three levels in slots"
    return None


def clip_argument(plan: str) -> bytes:
    """One of the last arguments of what encodes: the factor of clipping, where there is one."""
    clip = TensorPlan.parse(plan).codec.clip
    return b"" if clip == 1 else struct.pack("d", clip)


def sinks_argument(state: Sequence[Tensor]) -> bytes:
    """The last argument for a cache tensor: the address of its sinks, where it has any."""
    return struct.pack("P", state[3].data_ptr()) if len(state) == 5 else b""


def decline_device(x: Tensor) -> str | None:
    """Why C++ cannot work on ``x``, or None."""
    if interpreted():
        return "Triton's interpreter is asked for"
    if x.device.type != "cpu":
        return f"device {x.device.type} is not a CPU"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not supported; C++ takes float32, bfloat16 and float16"
    return None


def pointers(state: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """Addresses of codes, params, window and ends; 0 for what an identity codec lacks. See also
    `sinks_argument`."""
    if len(state) == 2:
        return state[0].data_ptr(), 0, 0, state[1].data_ptr()
    codes, params, window = state[:3]
    return codes.data_ptr(), params.data_ptr(), window.data_ptr(), state[-1].data_ptr()
