"""``kvpass::append`` in C++: whole flushes are encoded in place, the new tokens join the window."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.rope import Rope
from kvpass.errors import KernelError
from lowering.cpp.constants import (
    clip_argument,
    decline_device,
    decline_writing,
    middle_argument,
    outlier_argument,
    sinks_argument,
    state_argument,
)
from lowering.cpp.library import decline_compiler, load_function, tensor_parameters
from lowering.layouts import decline_gaps, exact_tokens, row_stride

_ARGUMENTS = struct.Struct("P5q")
_ROTARY = struct.Struct("P7q")
_UNTURNED = bytes(_ROTARY.size)


def supports(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append``, or None."""
    exact = exact_tokens(state, plan)
    if new.dtype != exact.dtype:
        return f"new tokens are {new.dtype}, those of the cache {exact.dtype}"
    if rows is not None and rows.dtype not in (new.dtype, torch.float32):
        return f"cosines and sines are {rows.dtype}, new tokens {new.dtype}"
    return (
        decline_device(new)
        or decline_writing(plan, int(new.shape[3]))
        or decline_gaps(state, plan)
        or decline_compiler("append", **tensor_parameters(plan, int(new.shape[3]), new.dtype))
    )


@cache
def _function(plan: str, dim: int, dtype: torch.dtype) -> Callable[[bytes], int]:
    return load_function("append", **tensor_parameters(plan, dim, dtype))


@cache
def _pairs(rope: str) -> tuple[int, int, int, int]:
    """First channel, number of pairs, channels from one to the next, and to the partner."""
    r = Rope.parse(rope)
    count = r.channels // 2
    return (r.start, count, 1, count) if r.kind == "halves" else (r.start, count, 2, 1)


def _rotary_argument(rows: Tensor | None, rope: str | None) -> bytes:
    if rows is None or rope is None:
        return _UNTURNED
    wide = rows.dtype == torch.float32
    return _ROTARY.pack(rows.data_ptr(), row_stride(rows), rows.stride(1), wide, *_pairs(rope))


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    rows: Tensor | None = None,
    rope: str | None = None,
) -> None:
    """As `kvpass.ops.append.append`, for arguments that `supports` takes.

    Raises:
        KernelError: if there is no room for the tokens that are due; nothing is written then.
    """
    _, heads, count, dim = new.shape
    if new.stride(3) != 1:
        new = new.contiguous()
    if rows is not None and rows.stride(2) != 1:
        rows = rows.contiguous()
    room = _function(plan, dim, new.dtype)(
        state_argument(state, plan)
        + _ARGUMENTS.pack(
            new.data_ptr(), new.stride(0), new.stride(1), new.stride(2),
            count, torch.get_num_threads(),
        )
        + _rotary_argument(rows, rope)
        + clip_argument(plan, heads, dim)
        + sinks_argument(state, plan)
        + middle_argument(plan)
        + outlier_argument(state, plan)
    )  # fmt: skip
    if room >= 0:
        raise KernelError(
            f"There is room for {room} packed tokens; {count} new ones do not fit. "
            "Make room with PackedKV.reserve() first."
        )
