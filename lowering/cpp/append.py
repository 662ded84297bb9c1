"""``kvpass::append`` in C++: whole runs are encoded in place, the new tokens join the window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.errors import KernelError
from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from lowering.cpp.constants import (
    address,
    clips_of,
    midpoints_of,
    unsupported_device,
    unsupported_writing,
)
from lowering.cpp.library import load_function, tensor_source, unsupported_compiler
from lowering.cpp.structs import state_numbers, tensor_structs
from lowering.triton.layouts import exact_tokens, row_stride, unsupported_gaps

_UNTURNED = (0,) * 8


def unsupported_reason(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
    *,
    segments: int = 1,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append``, or None. ``segments``: ends of a
    sequence in a state of tokens stored as they are, of which the last one is theirs."""
    exact = exact_tokens(state, plan)
    if new.dtype != exact.dtype:
        return f"new tokens are {new.dtype}, those of the cache {exact.dtype}"
    if rows is not None and rows.dtype not in (new.dtype, torch.float32):
        return f"cosines and sines are {rows.dtype}, new tokens {new.dtype}"
    return (
        unsupported_device(new)
        or unsupported_writing(plan, int(new.shape[3]))
        or unsupported_gaps(state, plan)
        or unsupported_compiler(
            "append", tensor_source(plan, int(new.shape[3]), new.dtype, segments)
        )
    )


@cache
def _function(plan: str, dim: int, dtype: torch.dtype, segments: int) -> Callable[[bytes], int]:
    return load_function("append", tensor_source(plan, dim, dtype, segments))


@cache
def _pairs(rope: str) -> tuple[int, int, int, int]:
    """First channel, number of pairs, channels from one to the next, and to the partner."""
    r = Rope.parse(rope)
    count = r.channels // 2
    return (r.start, count, 1, count) if r.kind == "halves" else (r.start, count, 2, 1)


def _rotary_numbers(rows: Tensor | None, rope: str | None) -> tuple[int, ...]:
    if rows is None or rope is None:
        return _UNTURNED
    wide = rows.dtype == torch.float32
    return rows.data_ptr(), row_stride(rows), rows.stride(1), wide, *_pairs(rope)


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
    *,
    segments: int = 1,
) -> None:
    """As `kvpass.ops.append.append`, for arguments that are supported.

    Raises:
        KernelError: if there is no room for the tokens that are due; nothing is written then.
    """
    _, heads, count, dim = new.shape
    if new.stride(3) != 1:
        new = new.contiguous()
    if rows is not None and rows.stride(2) != 1:
        rows = rows.contiguous()
    codec = parse_plan(plan).codec
    room = _function(plan, dim, new.dtype, segments)(
        tensor_structs(plan)["append"].pack(
            *state_numbers(state, plan),
            new.data_ptr(), new.stride(0), new.stride(1), new.stride(2),
            count, torch.get_num_threads(), *_rotary_numbers(rows, rope),
            address(clips_of(codec, heads, dim)), address(midpoints_of(codec)),
        )
    )  # fmt: skip
    if room >= 0:
        raise KernelError(
            f"There is room for {room} packed tokens; {count} new ones do not fit. "
            "Make room with PackedKV.reserve() first."
        )
