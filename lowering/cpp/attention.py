"""``kvpass::attention`` in C++: a block of tokens at a time, straight from packed words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass._torch_cpp import empty_cpu
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.ops.attention import AttentionArguments
from lowering.cpp.constants import (
    DTYPES,
    Constants,
    constants_of,
    unsupported_device,
    unsupported_plan,
)
from lowering.cpp.library import (
    native_lanes,
    native_tiles,
    packed_function,
    source,
    unsupported_compiler,
)
from lowering.cpp.structs import (
    BASIS,
    TOKENS,
    Struct,
    attention_struct,
    basis_numbers,
    positions,
    state_numbers,
    token_numbers,
)
from lowering.support import dense, unsupported_formats, unsupported_gaps

# Query rows whose sums, and those of the tokens beside them, fill the registers (gemv.h): more take
# turns. For many, tokens are decoded first, and rows fill vectors (gemm.h): of 8 numbers for so
# many rows, else of any size.
_GEMV_ROWS = 4
# The most rows that take turns, where codes are multiplied as floats, and as integers.
_FLOAT_TURNS = 8
_INTEGER_TURNS = 32
# The same where more of them are multiplied in tiles of the model's own type: of groups of some
# channels, and of all, for which turns have less to do.
_TILE_TURNS = 12
_WHOLE_TURNS = 16
_VECTOR_ROWS = 8
_GEMM_ROWS = 16
_FEWEST_LANES = 4
_KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}


class Kernel(NamedTuple):
    """What one function is made for.

    Attributes:
        rows: query rows, see `row_size`.
        segment: tokens are one of several segments.
        paged: tokens are in pages of many requests.
        partial: tokens are some of all.
    """

    k_plan: str
    v_plan: str
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    rows: int
    segment: bool = False
    paged: bool = False
    partial: bool = False

    @classmethod
    def of(
        cls, a: AttentionArguments, keys: State, values: State, segment: bool, partial: bool
    ) -> Kernel:
        """The kernel that these arguments, with these states, need."""
        k_dim, v_dim = int(a.q.shape[3]), int(values.tokens.shape[3])
        sides = a.k_plan, a.v_plan, k_dim, v_dim, a.q.dtype
        rows: int | torch.SymInt = a.q.shape[1] // keys.codes.shape[1] * a.q.shape[2]
        # A question to a symbol would guard the graph on its answer.
        size = row_size(rows, *sides) if isinstance(rows, int) else _GEMV_ROWS
        return cls(*sides, size, segment, partial=partial)

    @property
    def constants(self) -> tuple[Constants, Constants]:
        """What is known of keys and of values."""
        sides = (self.k_plan, self.k_dim), (self.v_plan, self.v_dim)
        k, v = (constants_of(*side, paged=self.paged) for side in sides)
        return k, v

    @property
    def lanes(self) -> int:
        """Numbers in a vector: no more than fill it."""
        lanes = native_lanes()
        if self.rows > _GEMV_ROWS:
            return min(lanes, self.rows)
        while lanes > _FEWEST_LANES and not all(c.fills(lanes) for c in self.constants):
            lanes //= 2
        return lanes

    @property
    def source(self) -> str:
        """The function in C++."""
        k, v = self.constants
        kind = self.segment, self.paged, self.partial
        struct = attention_struct(str(k.plan), str(v.plan), *kind)
        (keys, _), (values, _), *_ = struct.members
        assert isinstance(keys, Struct)
        assert isinstance(values, Struct)
        arguments = struct.declaration(
            f"using K = {keys.used_as}", f"using V = {values.used_as}", "using Element = Scalar",
            ROWS=self.rows if self.rows <= _GEMV_ROWS else 0,
            # Half of the registers hold sums; wide vectors come with twice as many registers.
            SUMS=16 if native_lanes() == 16 else 8,
            SEGMENT=self.segment, PAGED=self.paged, PARTIAL=self.partial,
        )  # fmt: skip
        structs = (
            TOKENS.declaration(),
            BASIS.declaration(),
            k.declaration(keys),
            v.declaration(values),
            arguments,
        )
        headers = "gemv.h" if self.rows <= _GEMV_ROWS else "gemm.h", "attention.h"
        return source(
            headers, ("attention",), structs,
            lanes=self.lanes, dtype=self.dtype, tiles=native_tiles(),
        )  # fmt: skip


@cache
def row_size(
    rows: int, k_plan: str, v_plan: str, k_dim: int, v_dim: int, dtype: torch.dtype
) -> int:
    """Query rows that a function for so many is made for: `_GEMM_ROWS`: any number. 1 and 2 leave
    room for tokens."""
    sides = constants_of(k_plan, k_dim), constants_of(v_plan, v_dim)
    tiles = native_tiles() and dtype is torch.bfloat16
    integers = dtype.itemsize == 2 and all(c.in_integers for c in sides)
    turns = _INTEGER_TURNS if integers else _FLOAT_TURNS
    if tiles and integers:
        turns = _WHOLE_TURNS if all(c.run == c.dim for c in sides) else _TILE_TURNS
    if rows > _GEMV_ROWS and rows <= turns and not any(c.dequant_first for c in sides):
        return _GEMV_ROWS
    sizes = (1, 2, _GEMV_ROWS) if tiles else (1, 2, _GEMV_ROWS, _VECTOR_ROWS)
    return next((size for size in sizes if rows <= size), _GEMM_ROWS)


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention``, or None."""
    return unsupported_arguments(AttentionArguments(*args, **kwargs))


def unsupported_partial(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention_partial``, or None."""
    return unsupported_arguments(AttentionArguments(*args, **kwargs), partial=True)


def unsupported_arguments(
    a: AttentionArguments, segment: bool = False, partial: bool = False
) -> str | None:
    """`unsupported_reason` for all tokens, for those of one ``segment``, or for some."""
    q, mask, (keys, values) = a.q, a.mask, a.states
    if reason := unsupported_formats(q, keys, values):
        return reason
    if mask is not None and mask.dtype not in _KINDS:
        return f"the mask is {mask.dtype}"
    plans = (a.k_plan, q.shape[3]), (a.v_plan, values.tokens.shape[3])
    if reason := next(filter(None, (unsupported_plan(*plan) for plan in plans)), None):
        return reason
    kernel = Kernel.of(a, keys, values, segment, partial)
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


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that are supported, and a ``basis``, see
    `kvpass.ops.append_attention.StepArguments`.

    A row that sees no token gives zero. Threads are torch's.
    """
    return _attend(*args, **kwargs)


def attention_partial(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.attention_partial.attention_partial`, for arguments that are supported."""
    return _attend(*args, **{**kwargs, "partial": True})


def attend_segment(
    a: AttentionArguments,
    positions: Tensor,
    segments: int,
    number: int,
    carried: Tensor,
    partial: bool = False,
) -> Tensor:
    """One segment of tokens, in one softmax with those that were attended to before.

    Args:
        a: keys, values and plans are those of the segment alone, whose exact window is never read.
            The segment of tokens stored as they are comes last and gives the result.
            ``segment_ends`` are int32 ``[B, segments]``: each row's tokens in each segment.
        positions: int32 ``[B, C]``, see `kvpass.ops.chunks`.
        segments, number: how many there are, and which one this is.
        carried: float32 ``[B, Hq, n, D + 2]``: what earlier segments have summed, then this one.
        partial: the result of the last segment is that of `attention_partial`.
    """
    more = (positions.data_ptr(), positions.shape[1], segments, number, carried.data_ptr())
    return _attend(*a, more=more, partial=partial and number == segments - 1)


@cache
def kernel_function(*kernel: Any) -> tuple[Callable[..., None], int]:
    """The function of a `Kernel` with these fields, and the tokens that a sliding window leaves, 0
    for all."""
    made = Kernel(*kernel)
    kind = made.segment, made.paged, made.partial
    struct = attention_struct(made.k_plan, made.v_plan, *kind)
    window_size = parse_plan(made.k_plan).window_size or 0
    return packed_function("attention", made.source, struct), window_size


def _attend(
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
    more: tuple[int, ...] = (),
    partial: bool = False,
    basis: Tensor | None = None,
) -> Tensor:
    """Attends to all tokens, to those of one segment, which takes ``more`` numbers, or to some, see
    `attention_partial`. ``basis``: see `attention`. `AttentionArguments` would take a tenth of the
    time to make."""
    q = dense(q)
    batch, heads, queries, k_dim = q.shape
    v_dim = values[positions(v_plan).tokens].shape[3]
    codes = keys[positions(k_plan).codes]
    sinks = readable_sinks(sinks)
    dtype = torch.float32 if partial else q.dtype
    out = empty_cpu((batch, heads, queries, v_dim + partial), dtype)
    rows = heads // codes.shape[1] * queries
    sides = k_plan, v_plan, k_dim, v_dim, q.dtype
    kernel = *sides, row_size(rows, *sides), bool(more), False, partial
    function, retained = kernel_function(*kernel)
    function(
        *state_numbers(keys, k_plan, k_dim),
        *state_numbers(values, v_plan, v_dim),
        *token_numbers(q),
        *basis_numbers(basis),
        *((0,) * 6 if mask is None else _mask_numbers(mask)),
        *sinks_numbers(sinks),
        out.data_ptr(), rows, queries,
        causal, window, retained, torch.get_num_threads(), scale, softcap, *more,
    )  # fmt: skip
    return out


def readable_sinks(sinks: Tensor | None) -> Tensor | None:
    """Attention sinks as kernels read them."""
    if sinks is not None and (sinks.dtype not in DTYPES or not sinks.is_contiguous()):
        return sinks.float().contiguous()
    return sinks


def sinks_numbers(sinks: Tensor | None) -> tuple[int, int]:
    """What kernels get of `readable_sinks`."""
    return (0, 0) if sinks is None else (sinks.data_ptr(), _KINDS[sinks.dtype])


def _mask_numbers(mask: Tensor) -> tuple[int, ...]:
    """Address, kind and strides; a broadcast dimension has stride 0."""
    strides = (s if n != 1 else 0 for s, n in zip(mask.stride(), mask.shape, strict=True))
    return (mask.data_ptr(), _KINDS[mask.dtype], *strides)
