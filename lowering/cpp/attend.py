"""The C++ functions of ``kvpass::attention``, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.ops.attention import AttentionArguments
from lowering.cpp.constants import (
    DTYPES,
    Constants,
    address,
    codebook_of,
    constants_of,
    unsupported_device,
    unsupported_plan,
)
from lowering.cpp.library import load_function, native_lanes, source, unsupported_compiler
from lowering.cpp.structs import attention_struct, state_numbers, state_struct
from lowering.triton.layouts import unsupported_formats, unsupported_gaps

# Query rows whose sums, and those of the tokens beside them, fill the registers. For more of them
# tokens are decoded first, and rows fill vectors: of 8 numbers for so many rows, else of any size.
_FEW_ROWS = 4
_VECTOR_ROWS = 8
_MANY_ROWS = 16
_FEWEST_LANES = 4
_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
_NO_MASK = (0, 0, 0, 0, 0)


class Kernel(NamedTuple):
    """What one function is made for.

    Attributes:
        rows: query rows, see `_rows`.
        segment: tokens are one of several segments.
    """

    k_plan: str
    v_plan: str
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    rows: int
    segment: bool

    @classmethod
    def of(cls, a: AttentionArguments, segment: bool) -> Kernel:
        """The one that these arguments need."""
        keys, values = a.states
        dims = int(keys.tokens.shape[3]), int(values.tokens.shape[3])
        return cls(a.k_plan, a.v_plan, *dims, a.q.dtype, _rows(a.q, keys.codes), segment)

    @property
    def constants(self) -> tuple[Constants, Constants]:
        """Those of keys and values."""
        return constants_of(self.k_plan, self.k_dim), constants_of(self.v_plan, self.v_dim)

    @property
    def lanes(self) -> int:
        """Vectors no wider than a plane of words, or than the rows that fill them: they would be
        mostly padding. What is decoded first may be so for the time of that."""
        lanes = native_lanes()
        if self.rows > _FEW_ROWS:
            return min(lanes, self.rows)
        width = min(2 * c.width if c.dequant_first else c.width for c in self.constants)
        while lanes > max(width, _FEWEST_LANES):
            lanes //= 2
        return lanes

    @property
    def source(self) -> str:
        """In C++."""
        k, v = self.constants
        keys = state_struct("KeyState", str(k.plan), shared=True)
        values = state_struct("ValueState", str(v.plan), shared=True)
        arguments = attention_struct(str(k.plan), str(v.plan), self.segment).declaration(
            f"using K = {keys.used_as}", f"using V = {values.used_as}", "using Element = Scalar",
            ROWS=self.rows if self.rows <= _FEW_ROWS else 0,
            # Half of the registers hold sums; wide vectors come with twice as many registers.
            SUMS=16 if native_lanes() == 16 else 8,
            SEGMENT=self.segment,
        )  # fmt: skip
        return source(
            ("attention",),
            (k.declaration(keys), v.declaration(values), arguments),
            lanes=self.lanes,
            dtype=self.dtype,
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


def decline(a: AttentionArguments, segment: bool = False) -> str | None:
    """As `lowering.cpp.attention.unsupported_reason`, of all tokens or those of one ``segment``."""
    q, mask, (keys, values) = a.q, a.mask, a.states
    if reason := unsupported_formats(q, keys, values):
        return reason
    if mask is not None and mask.dtype not in _KINDS:
        return f"the mask is {mask.dtype}"
    kernel = Kernel.of(a, segment)
    if reason := unsupported_plan(a.k_plan, kernel.k_dim) or unsupported_plan(
        a.v_plan, kernel.v_dim
    ):
        return reason
    if "cos_sin" in keys and keys.cos_sin.dtype != q.dtype:
        return f"cosines and sines are {keys.cos_sin.dtype}, the query is {q.dtype}"
    if "cos_sin" in values:
        return "values have a rotary embedding"
    return (
        next(filter(None, (c.unsupported_reason(kernel.lanes) for c in kernel.constants)), None)
        or unsupported_device(q)
        or unsupported_gaps(a.keys, a.k_plan)
        or unsupported_gaps(a.values, a.v_plan)
        or unsupported_compiler("attention", kernel.source)
    )


@cache
def _function(kernel: Kernel) -> Callable[[bytes], None]:
    return load_function("attention", kernel.source)


def attend(a: AttentionArguments, segment: bool = False, *more: int) -> Tensor:
    """All tokens, or those of one ``segment`` with ``more`` arguments."""
    q, mask, sinks, (k, v) = a.q, a.mask, a.sinks, a.states
    batch, heads, queries, _ = q.shape
    kernel = Kernel.of(a, segment)
    if q.stride(3) != 1:
        q = q.contiguous()
    if sinks is not None and (sinks.dtype not in DTYPES or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    out = q.new_empty((batch, heads, queries, kernel.v_dim))
    _function(kernel)(
        attention_struct(a.k_plan, a.v_plan, segment).pack(
            *state_numbers(a.keys, a.k_plan), *state_numbers(a.values, a.v_plan),
            q.data_ptr(), address(mask), address(sinks), out.data_ptr(),
            address(codebook_of(k.plan.codec)), address(codebook_of(v.plan.codec)),
            heads // k.codes.shape[1] * queries, queries, q.stride(0), q.stride(1), q.stride(2),
            *(_NO_MASK if mask is None else _mask_layout(mask)),
            0 if sinks is None else _KINDS[sinks.dtype],
            a.causal, a.window, k.plan.window_size or 0, torch.get_num_threads(), a.scale,
            a.softcap, *more,
        )
    )  # fmt: skip
    return out


def attend_segment(
    a: AttentionArguments,
    positions: Tensor,
    segments: int,
    number: int,
    carried: Tensor,
) -> Tensor:
    """One segment of tokens, in one softmax with those that were attended to before.

    Args:
        a: keys, values and plans are those of the segment alone, whose exact window is never read.
            That of tokens stored as they are comes last and gives the result;
            ends are int32 ``[B, segments]``: how many tokens each row has in each segment.
        positions: int32 ``[B, C]``, see `kvpass.ops.chunks`.
        segments, number: how many there are, and which one this is.
        carried: float32 ``[B, Hq, n, D + 2]``: what those before have summed, and then this one.
    """
    more = (positions.data_ptr(), positions.shape[1], segments, number, carried.data_ptr())
    return attend(a, True, *more)


def _mask_layout(mask: Tensor) -> tuple[int, ...]:
    """Kind and strides; a broadcast dimension has stride 0."""
    strides = (s if n != 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    return (_KINDS[mask.dtype], *strides)
