"""From a printed plan to what the kernels can do with it: layouts, and reasons to decline."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass._torch_sizes import at_most
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from lowering.support import (
    interpreted,
    row_stride,
    unsupported_extras,
    unsupported_gaps,
    unsupported_groups,
)
from triton_templates import CAPACITY_TILE, Layout

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Those that the kernels know.
FILTERS = ("heavy_hitters", "outliers")
# The limit of CUDA in all but the first dimension of a grid.
_MAX_GRID_ROWS = 65535


@cache
def layout_of(plan: str, head_dim: int) -> Layout:
    """The layout of a cache tensor with this printed plan."""
    p = parse_plan(plan)
    codec, sliding = p.codec, p.window_size is not None
    if codec.identity:
        return Layout(head_dim, sliding=sliding, state=p.layout.names)
    heads_per_group = codec.groups.heads_per_group(head_dim)
    base3 = codec.bits == 1.5 and not codec.ternary_in_2bit
    return Layout(
        head_dim, 2 if base3 else math.ceil(codec.words.bits), codec.axis,
        codec.group if heads_per_group == 1 else head_dim, p.ring, sliding, p.sinks,
        codec.qparams, codec.ternary_in_2bit, codec.static_ranges, heads_per_group, codec.outliers,
        codec.decoded_codebook or (), codec.midpoints,
        None if p.rope is None else (p.rope.start, p.rope.stop, p.rope.kind == "neighbours"),
        p.layout.names,
        tuple((extra.name, extra.size) for extra in codec.extras if extra.size), base3=base3,
        ratio=p.retention.ratio if p.grows else None, pivotal=p.retention.pivotal > 0,
        pack11=codec.pack11, half_split=codec.half_split,
        retained=(p.retained, str(p.retention.filter)) if p.retained else None,
    )  # fmt: skip


def stored(plan: TensorPlan) -> TensorPlan:
    """The plan without the rotary embedding that tokens get when they are read."""
    return replace(plan, rope=None)


def rooms(tensors: Sequence[Tensor], layout: Layout) -> tuple[int, ...]:
    """The tiles of `CAPACITY_TILE` tokens that these tensors of a layout have room for, and if the
    window grows its slots."""
    named = dict(zip(layout.state, tensors, strict=False))
    tiles = named["codes"].shape[2] // CAPACITY_TILE
    return (tiles, named["window"].shape[2]) if layout.grows else (tiles,)


def cos_sin_stride(state: State) -> int:
    """The `row_stride` of a state's cosines and sines, if it has any."""
    return row_stride(state.cos_sin) if "cos_sin" in state else 0


def symbolic(size: object) -> bool:
    """Whether a tensor's size is not known, only named."""
    return not isinstance(size, int)


class NewTokens(NamedTuple):
    """How many new tokens kernels are made for.

    Attributes:
        most: so many, or up to so many.
        varies: the kernels get their number as an argument, since it is symbolic.
    """

    most: int
    varies: bool

    @classmethod
    def of(cls, new: int | torch.SymInt) -> NewTokens:
        """The number for a step of so many tokens."""
        return cls(MAX_STEP, True) if symbolic(new) else cls(int(new), False)


def unsupported_new(new: int | torch.SymInt) -> str | None:
    """Why no kernel takes so many new tokens, or None."""
    if symbolic(new) and not at_most(new, MAX_STEP):
        return f"the number of new tokens is symbolic, and may be more than {MAX_STEP}"
    return None


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def unsupported_device(x: Tensor) -> str | None:
    """Why Triton cannot work on the device of ``x``, or None."""
    if not _triton_installed():
        return "triton is not installed"
    if x.device.type == "cpu" and not interpreted():
        return "Triton runs on CPU only in its interpreter, for tests"
    if x.device.type not in ("cpu", "cuda"):
        return f"device {x.device.type} is not supported"
    return None


def unsupported_dtype(x: Tensor, name: str) -> str | None:
    """Why the kernels cannot read ``x``, or None."""
    if x.dtype not in _DTYPES:
        return f"{name} is {x.dtype}; the kernels take float16, bfloat16 and float32"
    return None


def unsupported_heads(x: Tensor) -> str | None:
    """Why a grid cannot have a row for each head ``[B, H, ...]``, or None."""
    if symbolic(heads := x.shape[0] * x.shape[1]) or heads <= _MAX_GRID_ROWS:
        return None
    return f"the batch has {heads} heads; the kernels take {_MAX_GRID_ROWS}"


def unsupported_codec(plan: str) -> str | None:
    """Why the Triton kernels cannot work on tokens stored so, or None."""
    p = parse_plan(plan)
    codec = p.codec
    if p.rope is not None and codec.identity:
        return "exact keys before their rotary embedding are not supported"
    if reason := unsupported_groups(codec):
        return reason
    if p.retained and p.retention.filter not in FILTERS:
        return f"filter '{p.retention.filter}' is none of {', '.join(FILTERS)}"
    return None


def unsupported_encoding(plan: str, head_dim: int, clip: Tensor | None = None) -> str | None:
    """Why the Triton kernels cannot write tokens so, with these factors of clipping, or None."""
    codec = parse_plan(plan).codec
    if isinstance(codec.clip, tuple) and clip is None:
        return f"clip of {codec} differs between groups, and no tensor has its factors"
    if codec.clip != 1 and codec.groups.heads_per_group(head_dim) > 1:
        return f"groups of {codec} that span heads of {head_dim} are not clipped"
    return unsupported_extras(codec, "outliers") or unsupported_codec(plan)


def unsupported_decoding(k_plan: str, v_plan: str, k: Layout, v: Layout) -> str | None:
    """Why attention cannot decode these keys and values first, or None."""
    for plan, layout in ((k_plan, k), (v_plan, v)):
        if layout.sliding:
            return f"{plan} has to be decoded; that is not supported where a window slides"
        if layout.lanewise:
            return f"{plan} has to be decoded, and its groups are too short at {layout.head_dim}"
        if layout.ragged:
            how = "in base 3" if layout.base3 else "of 11 codes in 32 bits"
            return f"{plan} has to be decoded; that is not supported {how}"
        if layout.retained:
            return f"{plan} has to be decoded; that is not supported with retained tokens"
        if layout.grows:
            return f"{plan} has to be decoded; that is not supported where the window grows"
    return None


def unsupported_state(state: Sequence[Tensor], plan: str) -> str | None:
    """Why the kernels cannot work on this state, or None."""
    if reason := unsupported_codec(plan) or unsupported_gaps(state, plan):
        return reason
    s = State.of(state, plan)
    if not symbolic(s.capacity) and s.capacity % CAPACITY_TILE:
        return f"its room for {s.capacity} tokens is no multiple of {CAPACITY_TILE}"
    layout = layout_of(plan, int(s.tokens.shape[3]))
    return layout.unsupported_reason() or unsupported_dtype(s.tokens, "the cache")


def heads_together(layout: Layout, heads: int) -> int:
    """How many of a token's ``heads`` a kernel encodes together."""
    if not layout.cross_head:
        return 1
    return layout.heads_per_group if layout.axis == "token" else heads


def clipping(plan: TensorPlan, clip: Tensor | None) -> tuple[float | Tensor, bool]:
    """What kernels multiply the ranges of groups by, and whether each has its own; of a supported
    plan."""
    if not isinstance(plan.codec.clip, tuple):
        return float(plan.codec.clip), False
    assert clip is not None
    return clip, True
