"""What kernels in C++ must know of a cache tensor, and reasons to decline one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.format.words import TERNARY, Planes
from lowering.cpp.structs import Struct
from lowering.support import (
    interpreted,
    unbounded,
    unsupported_calibrated,
    unsupported_extras,
    unsupported_groups,
)

# The types of models, in C++.
DTYPES = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


@dataclass(frozen=True)
class Constants:
    """What kernels know of a cache tensor when they are compiled: constants of its struct in C++.

    Attributes:
        plan: without what kernels get at run time: window size, room, factors of clipping, and the
            numbers of a codebook.
        dim: channels of a head.
        sliding: the token at position ``t`` is stored at slot ``t % capacity``.
        clipped: the ends of groups are multiplied by a factor.
        segments: ends of a sequence, where chunks have different bits: tokens stored as they are
            have the last one.
        paged: tokens are in pages of many requests.
    """

    plan: TensorPlan
    dim: int
    sliding: bool = False
    clipped: bool = False
    segments: int = 1
    paged: bool = False

    @property
    def packed(self) -> bool:
        """Tokens are stored as codes."""
        return not self.plan.codec.identity

    @property
    def dequant_first(self) -> bool:
        """Tokens are decoded before they are multiplied, not read as codes."""
        codec = self.plan.codec
        calibrated = codec.codebook is not None or codec.has_extras or not codec.group
        decoded = self.packed and (calibrated or self.heads_per_group > 1)
        return decoded or self.plan.rope is not None

    @property
    def in_integers(self) -> bool:
        """Kernels for models in 16 bits may multiply codes as integers (panel.h)."""
        return self.packed and not self.dequant_first and isinstance(self.plan.codec.words, Planes)

    @property
    def heads_per_group(self) -> int:
        """Heads that a group spans."""
        return self.plan.codec.groups.heads_per_group(self.dim)

    @property
    def period(self) -> int:
        """Channels after which groups of channels begin again."""
        return self.dim // 2 if self.plan.codec.half_split else self.dim

    @property
    def run(self) -> int:
        """Channels of a group that lie side by side in a head."""
        codec = self.plan.codec
        if codec.identity or codec.axis == "channel":
            return self.dim
        return codec.group // 2 if codec.half_split else min(codec.group, self.dim)

    @property
    def width(self) -> int:
        """Channels of a plane, whose codes lie side by side; at 16 bits all of them."""
        return -(-self.dim // self.plan.codec.words.planes) if self.packed else self.dim

    def fills(self, lanes: int) -> bool:
        """Vectors of ``lanes`` numbers are not mostly padding: what is decoded first may be so for
        the time of that, and a vector of words may hold several tokens (planes.h)."""
        if self.dequant_first:
            return 2 * self.width >= lanes
        one_part = self.packed and self.plan.codec.words.parts == 1
        several = one_part and self.width >= 4 and lanes % self.width == 0
        return self.width >= lanes or several

    def unsupported_reason(self, lanes: int) -> str | None:
        """Why vectors of ``lanes`` numbers cannot work on these groups, or None."""
        for plane in range(0, self.dim, self.width):
            for first in range(plane, plane + self.width, lanes):
                last = min(first + lanes, plane + self.width) - 1
                if last // self.run - first // self.run > 1:
                    group = self.plan.codec.group
                    return f"groups of {group} channels are too small for {lanes} lanes"
        return None

    def declaration(self, struct: Struct) -> str:
        """``struct``, of the tensors of its state, in C++, with the types and constants that the
        headers take from it."""
        p, codec, rope = self.plan, self.plan.codec, self.plan.rope
        ratio, divisor = (p.retention.ratio if p.grows else None) or (0, 0)
        return f"// {p}\n" + struct.declaration(
            f"using Words = {codec.words.struct if self.packed else 'Bits<16>'}",
            f"using Number = {'Float8' if codec.qparams == 'fp8' else 'Float16'}",
            "using Element = Scalar",
            DIM=self.dim, PACKED=self.packed, DEQUANT_FIRST=self.dequant_first,
            BITS=int(codec.words.bits) if self.packed else 16, MAX_CODE=codec.max_code,
            GROUP=codec.group, BY_TOKEN=codec.axis == "token", RUN=self.run, PERIOD=self.period,
            HEADS_PER_GROUP=self.heads_per_group, CLIPPED=self.clipped,
            CODEBOOK=codec.codebook is not None, **{e.name.upper(): e.size for e in codec.extras},
            WINDOW=p.retention.window, PACK_EVERY=p.retention.pack_every, RING=p.ring,
            SINKS=p.sinks, SLIDING=self.sliding, SEGMENTS=self.segments, PAGED=self.paged,
            RATIO=ratio, RATIO_DIVISOR=divisor, PIVOTAL=p.retention.pivotal > 0,
            ROPE_START=rope.start if rope else 0, ROPE_CHANNELS=rope.channels if rope else 0,
            ROPE_HALVES=rope is not None and rope.kind == "halves",
        )  # fmt: skip


@cache
def constants_of(
    plan: str, dim: int, encodes: bool = False, segments: int = 1, paged: bool = False
) -> Constants:
    """The constants of a cache tensor with this printed plan and head dimension, to be read only or
    to be written as well; of a state with so many ``segments``, or of pages, see `Constants`."""
    given = parse_plan(plan)
    codec = given.codec
    codebook = None if codec.codebook is None else tuple(map(float, range(len(codec.codebook))))
    plain = replace(codec, clip=1.0, codebook=codebook, qnorm=None)
    p = unbounded(replace(given, codec=plain, rope=None if encodes else given.rope))
    sliding, clipped = given.window_size is not None, encodes and codec.clip != 1
    return Constants(p, dim, sliding, clipped, segments, paged)


def unsupported_plan(plan: str, dim: int) -> str | None:
    """Why C++ cannot attend to tokens of ``dim`` channels stored so, or None."""
    p = parse_plan(plan)
    codec = p.codec
    if reason := unsupported_groups(codec):
        return reason
    if p.retained:
        return f"filter '{p.retention.filter}' is not supported"
    constants = constants_of(plan, dim)
    if codec.half_split and constants.period % constants.width:
        return f"half-split groups of {plan} do not fill planes of {constants.width} channels"
    return None


def unsupported_reading(plan: str, dim: int) -> str | None:
    """Why C++ cannot decode tokens of ``dim`` channels stored so, or None."""
    codec = parse_plan(plan).codec
    return (
        unsupported_calibrated(plan)
        or unsupported_groups(codec, dim)
        or unsupported_plan(plan, dim)
    )


def unsupported_writing(plan: str, dim: int) -> str | None:
    """Why C++ cannot encode tokens of ``dim`` channels so, or None."""
    codec = parse_plan(plan).codec
    cross_head = codec.groups.heads_per_group(dim) > 1
    if cross_head and codec.clip != 1:
        return f"groups of {codec} that span heads of {dim} are not clipped"
    if cross_head and codec.words is TERNARY:
        return f"base 3 of {codec} is not supported where groups span heads"
    if codec.codebook is not None and codec.axis == "channel" and not codec.static_ranges:
        return "a codebook per channel is written in calibrated ranges only"
    if codec.codebook is not None and codec.axis == "token" and codec.group < dim:
        return f"a codebook is written in groups of whole heads, not of {codec.group} channels"
    return unsupported_extras(codec, "outliers") or unsupported_plan(plan, dim)


def unsupported_device(x: Tensor) -> str | None:
    """Why C++ cannot work on ``x``, or None."""
    if interpreted():
        return "Triton's interpreter is asked for"
    if x.device.type != "cpu":
        return f"device {x.device.type} is not a CPU"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not supported; C++ takes float32, bfloat16 and float16"
    return None
