"""From a printed plan to what the kernels can do with it: layouts, and reasons to decline."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvpass.format.codec import Codec
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from triton_templates import CAPACITY_TILE, Layout

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of CUDA, in all but the first dimension of a grid.
_MOST_GRID_ROWS = 65535


@cache
def layout_of(plan: str, head_dim: int) -> Layout:
    """The layout of a cache tensor with this printed plan."""
    p = parse_plan(plan)
    sliding = p.window_size is not None
    if p.codec.identity:
        return Layout(head_dim, sliding=sliding, state=p.layout.names)
    codec, bits = p.codec, int(p.codec.words.bits)
    joined = codec.groups.heads_per_group(head_dim)
    return Layout(
        head_dim, bits, codec.axis, codec.group if joined == 1 else head_dim, p.ring, sliding,
        p.sinks, codec.qparams, codec.ternary_in_2bit, codec.static_ranges, joined, codec.outliers,
        codec.decoded_codebook or (), codec.midpoints,
        None if p.rope is None else (p.rope.start, p.rope.stop), p.layout.names,
    )  # fmt: skip


def unbounded(plan: TensorPlan) -> TensorPlan:
    """The plan without how many tokens it keeps or has room for, which kernels are told at run
    time."""
    return replace(plan, window_size=None, room=None)


def stored(plan: TensorPlan) -> TensorPlan:
    """The plan without the rotary embedding that tokens get when they are read."""
    return replace(plan, rope=None)


def exact_tokens(state: Sequence[Tensor], plan: str) -> Tensor:
    """The tensor of a state that holds tokens ``[B, H, ..., D]`` in the model's dtype."""
    return State.of(state, plan).tokens


def capacity_tiles(state: State) -> int:
    """Tiles of `CAPACITY_TILE` tokens that a state has room for."""
    return state.capacity // CAPACITY_TILE


def rotary_stride(state: State) -> int:
    """From one sequence's cosines and sines to the next one's; all may have the same ones."""
    return row_stride(state.cos_sin) if "cos_sin" in state else 0


def row_stride(rows: Tensor) -> int:
    """From one sequence's rows ``[B or 1, n, R]`` to the next one's, see `rotary_stride`."""
    return rows.stride(0) if rows.shape[0] != 1 else 0


def symbolic(size: object) -> bool:
    """A tensor's size is not known, only named."""
    return not isinstance(size, int)


@cache
def interpreted() -> bool:
    """Triton runs in its interpreter (``TRITON_INTERPRET=1`` when it was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


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


def unsupported_pairs(x: Tensor) -> str | None:
    """Why a grid cannot have a row for each head ``[B, H, ...]``, or None."""
    if symbolic(pairs := x.shape[0] * x.shape[1]) or pairs <= _MOST_GRID_ROWS:
        return None
    return f"the batch has {pairs} heads; the kernels take {_MOST_GRID_ROWS}"


def unsupported_conversion(exact: Tensor, dtype: torch.dtype) -> str | None:
    """Why no kernel unpacks a cache whose exact tokens are ``exact`` to ``dtype``, or None."""
    if dtype != exact.dtype:
        return f"tokens are wanted as {dtype}, those of the cache are {exact.dtype}"
    return None


def unsupported_formats(q: Tensor, keys: State, values: State) -> str | None:
    """Why no kernel attends with this query to keys and values stored so, or None."""
    k, v = keys.plan, values.plan
    if k.window_size != v.window_size:
        return f"keys {k} and values {v} do not keep the same tokens"
    if len({p.sinks for p in (k, v) if not p.codec.identity}) > 1:
        return f"keys {k} and values {v} do not have the same sinks"
    if v.codec.token_group > 1:
        return f"values {v} have groups along tokens"
    if not q.dtype == keys.tokens.dtype == values.tokens.dtype:
        dtypes = keys.tokens.dtype, values.tokens.dtype
        return f"the query is {q.dtype}, keys are {dtypes[0]}, values {dtypes[1]}"
    return None


def unsupported_calibrated(plan: str) -> str | None:
    """Why no kernel works on tokens stored so, or None."""
    p = parse_plan(plan)
    found = {
        "keys before their rotary embedding": p.rope is not None,
        "outliers": p.codec.outliers,
        "tables of levels": p.codec.codebook is not None,
        "calibrated ranges": p.codec.static_ranges,
    }
    return next((f"{name} are not supported" for name, holds in found.items() if holds), None)


def _unsupported_rope(plan: TensorPlan) -> str | None:
    if plan.rope is None:
        return None
    if plan.rope.kind != "halves":
        return f"rotary embedding {plan.rope} of neighbours is not supported"
    return (
        "exact keys before their rotary embedding are not supported"
        if plan.codec.identity
        else None
    )


def unsupported_filter(plan: str) -> str | None:
    """Why no kernel works on tokens stored so, or None."""
    p = parse_plan(plan)
    return f"filter '{p.retention.filter}' is not supported" if p.retained else None


def unsupported_groups(codec: Codec, head_dim: int | None = None) -> str | None:
    """Why no kernel works on the groups of a codec, or None."""
    if codec.sizes is not None:
        return f"sizes of {codec} are not supported"
    if head_dim is not None and codec.groups.heads_per_group(head_dim) > 1:
        return f"groups of {codec} that span heads of {head_dim} are not supported"
    return None


def unsupported_codec(plan: str) -> str | None:
    """Why the Triton kernels cannot work on tokens stored so, or None."""
    p = parse_plan(plan)
    codec = p.codec
    if reason := _unsupported_rope(p) or unsupported_groups(codec):
        return reason
    if reason := unsupported_filter(plan):
        return reason
    if p.grows:
        return f"the window of {plan} grows with the context"
    if codec.half_split:
        return f"pairs of {codec} are not supported"
    if codec.pack11:
        return f"11 codes in 32 bits of {codec} are not supported"
    if codec.bits == 1.5 and not codec.ternary_in_2bit:
        return f"base 3 of {codec} is not supported; the kernels take its three levels in slots"
    return None


def unsupported_encoding(plan: str, head_dim: int) -> str | None:
    """Why the Triton kernels cannot write tokens so, or None."""
    codec = parse_plan(plan).codec
    if isinstance(codec.clip, tuple):
        return f"clip of {codec} differs between groups; the kernels take one number"
    if codec.clip != 1 and codec.groups.heads_per_group(head_dim) > 1:
        return f"groups of {codec} that span heads of {head_dim} are not clipped"
    return unsupported_codec(plan)


def encoded_heads(layout: Layout, heads: int) -> int:
    """How many of a token's ``heads`` are encoded together."""
    return layout.heads_per_group if layout.axis == "token" else heads


def unsupported_decoding(k_plan: str, v_plan: str, k: Layout, v: Layout) -> str | None:
    """Why the kernels that decode these keys and values cannot attend to them, or None."""
    for plan, layout in ((k_plan, k), (v_plan, v)):
        if layout.sliding:
            return f"{plan} has to be decoded; that is not supported where a window slides"
        if layout.lanewise:
            return f"{plan} has to be decoded, and its groups are too short at {layout.head_dim}"
    return None


def clip_factor(plan: TensorPlan) -> float:
    """What the kernels multiply the ends of all groups by; of a supported plan."""
    assert not isinstance(plan.codec.clip, tuple)
    return float(plan.codec.clip)


def unsupported_gaps(state: Sequence[Tensor], plan: str) -> str | None:
    """Why no kernel can address this state, or None."""
    # What is extended is told without what all layers share.
    for name, tensor in zip(parse_plan(plan).layout.names, state, strict=False):
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
    return None


def unsupported_state(state: Sequence[Tensor], plan: str) -> str | None:
    """Why the kernels cannot work on this state, or None."""
    if reason := unsupported_codec(plan) or unsupported_gaps(state, plan):
        return reason
    named = State.of(state, plan)
    exact, capacity = named.tokens, named.capacity
    if not symbolic(capacity) and capacity % CAPACITY_TILE:
        return f"its room for {capacity} tokens is no multiple of {CAPACITY_TILE}"
    return layout_of(plan, int(exact.shape[3])).unsupported_reason() or unsupported_dtype(
        exact, "the cache"
    )
