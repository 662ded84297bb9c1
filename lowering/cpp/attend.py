"""The C++ functions of ``kvpass::attention``, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.ops.attention import AttentionArguments
from lowering.cpp.constants import (
    DTYPES,
    address,
    constants_of,
    decline_device,
    decline_plan,
    levels_of,
)
from lowering.cpp.library import decline_compiler, load_function, native_lanes
from lowering.cpp.structs import attention_struct, state_numbers
from lowering.layouts import decline_formats, decline_gaps

# Polynomial for 2 ** x on [-0.5, 0.5], highest power first: least squares of the relative error.
_EXP2 = (0.0013266971, 0.00967546, 0.055507425, 0.24022122, 0.69314694, 1.0000001)
# Query rows whose sums, and those of the tokens beside them, fill the registers. For more of them
# tokens are decoded first, and rows fill vectors: of 8 numbers for so many rows, else of any size.
_FEW_ROWS = 4
_VECTOR_ROWS = 8
_MANY_ROWS = 16
_FEWEST_LANES = 4
_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
_NO_MASK = (0, 0, 0, 0, 0)

Function = Callable[[bytes], None]


def decline(a: AttentionArguments, segment: str = "") -> str | None:
    """As `lowering.cpp.attention.supports`, of all tokens or those of one ``segment``."""
    q, mask, (keys, values) = a.q, a.mask, a.states
    if reason := decline_formats(q, keys, values):
        return reason
    if mask is not None and mask.dtype not in _KINDS:
        return f"the mask is {mask.dtype}"
    k_dim, v_dim = int(keys.tokens.shape[3]), int(values.tokens.shape[3])
    if reason := decline_plan(a.k_plan, k_dim) or decline_plan(a.v_plan, v_dim):
        return reason
    if "cos_sin" in keys and keys.cos_sin.dtype != q.dtype:
        return f"cosines and sines are {keys.cos_sin.dtype}, the query is {q.dtype}"
    if "cos_sin" in values:
        return "values have a rotary embedding"
    rows = _rows(q, keys.codes)
    parameters = (a.k_plan, a.v_plan, k_dim, v_dim)
    for plan, dim in ((a.k_plan, k_dim), (a.v_plan, v_dim)):
        if reason := constants_of(plan, dim).misfit(_lanes(*parameters, rows)):
            return reason
    return (
        decline_device(q)
        or decline_gaps(a.keys, a.k_plan)
        or decline_gaps(a.values, a.v_plan)
        or decline_compiler("attention", **_parameters(*parameters, q.dtype, rows, segment))
    )


def _rows(q: Tensor, k: Tensor) -> int:
    """Query rows that a function is made for, no fewer than share a KV head; `_MANY_ROWS`: any
    number. 1 and 2 leave room for tokens."""
    rows: int | torch.SymInt = q.shape[1] // k.shape[1] * q.shape[2]
    # A question to a symbol would guard the graph on its answer.
    if not isinstance(rows, int):
        return _FEW_ROWS
    sizes = (1, 2, _FEW_ROWS, _VECTOR_ROWS)
    return next((size for size in sizes if rows <= size), _MANY_ROWS)


def _lanes(k_plan: str, v_plan: str, k_dim: int, v_dim: int, rows: int) -> int:
    """Vectors no wider than a plane of words, or than the rows that fill them: they would be mostly
    padding. What is decoded first may be so for the time of that."""
    lanes = native_lanes()
    if rows > _FEW_ROWS:
        return min(lanes, rows)
    known = (constants_of(k_plan, k_dim), constants_of(v_plan, v_dim))
    width = min(2 * c.width if c.decoded else c.width for c in known)
    while lanes > max(width, _FEWEST_LANES):
        lanes //= 2
    return lanes


def _parameters(
    k_plan: str,
    v_plan: str,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    rows: int,
    segment: str = "",
) -> dict[str, object]:
    k, v = constants_of(k_plan, k_dim), constants_of(v_plan, v_dim)
    return {
        "segment": segment,
        "arguments": attention_struct(k.name, v.name, bool(segment)),
        "lanes": _lanes(k_plan, v_plan, k_dim, v_dim, rows),
        # Half of the registers hold sums; wide vectors come with twice as many registers.
        "sums": 16 if native_lanes() == 16 else 8,
        "dtype": DTYPES[dtype],
        "k": k,
        "v": v,
        "rows": rows if rows <= _FEW_ROWS else 0,
        "exp2": _EXP2,
    }


@cache
def _function(
    k_plan: str,
    v_plan: str,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    rows: int,
    segment: str = "",
) -> Function:
    parameters = _parameters(k_plan, v_plan, k_dim, v_dim, dtype, rows, segment)
    return load_function("attention", **parameters)


def attend(a: AttentionArguments, segment: str = "", *more: int) -> Tensor:
    """All tokens, or those of one ``segment`` with ``more`` arguments."""
    q, mask, sinks, (k, v) = a.q, a.mask, a.sinks, a.states
    batch, heads, queries, k_dim = q.shape
    kv_heads, v_dim = k.codes.shape[1], v.tokens.shape[3]
    if q.stride(3) != 1:
        q = q.contiguous()
    if sinks is not None and (sinks.dtype not in DTYPES or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    function = _function(a.k_plan, a.v_plan, k_dim, v_dim, q.dtype, _rows(q, k.codes), segment)
    out = q.new_empty((batch, heads, queries, v_dim))
    function(
        attention_struct(a.k_plan, a.v_plan, bool(segment)).pack(
            *state_numbers(a.keys, a.k_plan), *state_numbers(a.values, a.v_plan),
            q.data_ptr(), address(mask), address(sinks), out.data_ptr(),
            address(levels_of(k.plan.codec)), address(levels_of(v.plan.codec)),
            heads // kv_heads * queries, queries, q.stride(0), q.stride(1), q.stride(2),
            *(_NO_MASK if mask is None else _mask_layout(mask)),
            0 if sinks is None else _KINDS[sinks.dtype],
            a.causal, a.window, k.plan.keep or 0, torch.get_num_threads(), a.scale, a.softcap,
            *more,
        )
    )  # fmt: skip
    return out


def attend_segment(
    a: AttentionArguments,
    kind: str,
    positions: Tensor,
    segments: int,
    number: int,
    carried: Tensor,
) -> Tensor:
    """One segment of tokens, in one softmax with those that were attended to before.

    Args:
        a: keys, values and plans are those of the segment alone, whose exact window is never read;
            ends are int32 ``[B, segments]``: how many tokens each row has in each segment.
        kind: ``"exact"`` for the last segment, which gives the result; ``"packed"``.
        positions: int32 ``[B, C]``, see `kvpass.ops.chunks`.
        segments, number: how many there are, and which one this is.
        carried: float32 ``[B, Hq, n, D + 2]``: what those before have summed, and then this one.
    """
    more = (positions.data_ptr(), positions.shape[1], segments, number, carried.data_ptr())
    return attend(a, kind, *more)


def _mask_layout(mask: Tensor) -> tuple[int, ...]:
    """Kind and strides; a broadcast dimension has stride 0."""
    strides = (s if n != 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    return (_KINDS[mask.dtype], *strides)
