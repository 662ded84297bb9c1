"""``kvpass::attention`` in C++: a block of tokens at a time, straight from packed words."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.codec import FP
from kvpass.cache.residency import Residency, TensorPlan
from lowering.cpp.constants import (
    DTYPES,
    constants_of,
    decline_device,
    decline_plan,
    level_argument,
    outlier_argument,
    pointers,
    ring_argument,
    rotary_argument,
    sinks_argument,
)
from lowering.cpp.library import decline_compiler, load_function, native_lanes
from lowering.layouts import decline_formats, decline_gaps, exact_tokens

# Polynomial for 2 ** x on [-0.5, 0.5], highest power first: least squares of the relative error.
_EXP2 = (0.0013266971, 0.00967546, 0.055507425, 0.24022122, 0.69314694, 1.0000001)
# Query rows whose sums, and those of the tokens beside them, fill the registers. For more of them
# tokens are decoded first, and rows fill vectors: of 8 numbers for so many rows, else of any size.
_FEW_ROWS = 4
_VECTOR_ROWS = 8
_MANY_ROWS = 16
_FEWEST_LANES = 4
_ARGUMENTS = struct.Struct("12P19q2d")
_SEGMENT = struct.Struct("P3qP")
_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
_NO_MASK = (0, 0, 0, 0, 0)

Function = Callable[[bytes], None]


def supports(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention``, or None."""
    if TensorPlan.parse(k_plan).levels:
        return _decline_chunks(q, keys, values, mask, k_plan, v_plan, window)
    return _decline(q, keys, values, mask, k_plan, v_plan)


def _decline(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    k_plan: str,
    v_plan: str,
    segment: str = "",
) -> str | None:
    k, v = exact_tokens(keys, k_plan), exact_tokens(values, v_plan)
    if reason := decline_formats(q, k, v, k_plan, v_plan):
        return reason
    if mask is not None and mask.dtype not in _KINDS:
        return f"the mask is {mask.dtype}"
    k_dim, v_dim = int(k.shape[3]), int(v.shape[3])
    if reason := decline_plan(k_plan, k_dim) or decline_plan(v_plan, v_dim):
        return reason
    if TensorPlan.parse(k_plan).rope is not None and keys[-2].dtype != q.dtype:
        return f"cosines and sines are {keys[-2].dtype}, the query is {q.dtype}"
    if TensorPlan.parse(v_plan).rope is not None:
        return "values have a rotary embedding"
    rows = _rows(q, k)
    for plan, dim in ((k_plan, k_dim), (v_plan, v_dim)):
        if reason := constants_of(plan, dim).misfit(_lanes(k_plan, v_plan, k_dim, v_dim, rows)):
            return reason
    return (
        decline_device(q)
        or decline_gaps(keys, k_plan)
        or decline_gaps(values, v_plan)
        or decline_compiler(
            "attention",
            **_parameters(k_plan, v_plan, k_dim, v_dim, q.dtype, rows, segment),
        )
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
    return {
        **({"segment": segment} if segment else {}),
        "lanes": _lanes(k_plan, v_plan, k_dim, v_dim, rows),
        # Half of the registers hold sums; wide vectors come with twice as many registers.
        "sums": 16 if native_lanes() == 16 else 8,
        "dtype": DTYPES[dtype],
        "k": constants_of(k_plan, k_dim),
        "v": constants_of(v_plan, v_dim),
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


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that `supports` takes.

    Args and result are that function's. A row that sees no token gives zero. Threads are torch's.
    """
    arguments = (q, keys, values, mask, scale, k_plan, v_plan, sinks, causal, window, softcap)
    return _attend_chunks(*arguments) if TensorPlan.parse(k_plan).levels else _attend(*arguments)


def _attend(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None,
    causal: bool,
    window: int,
    softcap: float,
    segment: str = "",
    more: bytes = b"",
) -> Tensor:
    """All tokens, or those of one ``segment`` with ``more`` arguments."""
    batch, heads, queries, k_dim = q.shape
    k_codes, v_codes = keys[0], values[0]
    kv_heads = k_codes.shape[1]
    v_dim = exact_tokens(values, v_plan).shape[3]
    if q.stride(3) != 1:
        q = q.contiguous()
    if sinks is not None and (sinks.dtype not in DTYPES or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    function = _function(k_plan, v_plan, k_dim, v_dim, q.dtype, _rows(q, k_codes), segment)
    out = q.new_empty((batch, heads, queries, v_dim))
    function(
        _ARGUMENTS.pack(
            q.data_ptr(), *pointers(keys, k_plan), *pointers(values, v_plan),
            0 if mask is None else mask.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            batch, kv_heads, heads // kv_heads * queries, queries,
            k_codes.shape[2], v_codes.shape[2], q.stride(0), q.stride(1), q.stride(2),
            *(_NO_MASK if mask is None else _mask_layout(mask)),
            0 if sinks is None else _KINDS[sinks.dtype],
            causal, window, TensorPlan.parse(k_plan).keep or 0,
            torch.get_num_threads(), scale, softcap,
        )
        + sinks_argument(keys, k_plan)
        + sinks_argument(values, v_plan)
        + level_argument(k_plan)
        + outlier_argument(keys, k_plan)
        + level_argument(v_plan)
        + outlier_argument(values, v_plan)
        + rotary_argument(keys, k_plan)
        + ring_argument(keys, k_plan)
        + ring_argument(values, v_plan)
        + more
    )  # fmt: skip
    return out


def _mask_layout(mask: Tensor) -> tuple[int, ...]:
    """Kind and strides; a broadcast dimension has stride 0."""
    strides = (s if n != 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    return (_KINDS[mask.dtype], *strides)


@dataclass(frozen=True)
class _Segment:
    """One segment of chunks as a cache tensor of its own, whose exact window is never read.

    Attributes:
        plan: its plan.
        parts: the places of its state in that of the whole.
        places: the place of the positions of its tokens.
    """

    plan: str
    parts: tuple[int, ...]
    places: int

    @property
    def kind(self) -> str:
        """See attention.cpp.jinja."""
        return "exact" if len(self.parts) == 2 else "packed"

    def state(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Of the segment."""
        return [whole[i] for i in self.parts]


@cache
def _segments(plan: str) -> tuple[_Segment, ...]:
    """Those of the levels, and of exact tokens at the end."""
    p = TensorPlan.parse(plan)
    at, found = p.state_names.index, []
    for i, codec in enumerate(p.levels):
        if codec.identity:
            plan, names = str(FP), [f"codes{i}", "ends"]
        else:
            plan = str(TensorPlan(codec, Residency(0, codec.token_group)))
            names = [f"codes{i}", f"params{i}", "codes", "ends"]
        found.append(_Segment(plan, tuple(map(at, names)), at(f"places{i}")))
    return (*found, _Segment(str(FP), (at("codes"), at("ends")), at("places")))


def _decline_chunks(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    k_plan: str,
    v_plan: str,
    window: int,
) -> str | None:
    """As `supports`, where plans have levels."""
    if window:
        return f"a window of {window} tokens that lie in the order of their bits"
    if reason := decline_gaps(keys, k_plan) or decline_gaps(values, v_plan):
        return reason
    segments = list(zip(_segments(k_plan), _segments(v_plan), strict=True))
    kinds = [{k.kind, v.kind} for k, v in segments]
    if kinds != [*[{"packed"}] * (len(kinds) - 1), {"exact"}]:
        return f"a level of {k_plan} and {v_plan} is stored as it is"
    for k, v in segments:
        states = k.state(keys), v.state(values)
        if reason := _decline(q, *states, mask, k.plan, v.plan, k.kind):
            return reason
    return None


def _attend_chunks(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """One segment after the other, each by code for its pair of codecs, in one softmax: each
    function carries on what those before it have summed."""
    segments = list(zip(_segments(k_plan), _segments(v_plan), strict=True))
    carried = q.new_empty((*q.shape[:3], values[0].shape[3] + 2), dtype=torch.float32)
    for number, (k, v) in enumerate(segments):
        places = keys[k.places]
        more = (places.data_ptr(), places.shape[1], len(segments), number, carried.data_ptr())
        out = _attend(
            q, k.state(keys), v.state(values), mask, scale, k.plan, v.plan, sinks, causal, window,
            softcap, k.kind, _SEGMENT.pack(*more),
        )  # fmt: skip
    return out
