"""``kvpass::pack`` in C++: the state of a first prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.state import empty_state
from lowering.cpp.constants import (
    address,
    clips_of,
    midpoints_of,
    unsupported_device,
    unsupported_writing,
)
from lowering.cpp.library import load_function, tensor_source, unsupported_compiler
from lowering.cpp.structs import state_numbers, tensor_structs
from lowering.triton.layouts import unbounded


def unsupported_reason(new: Tensor, plan: str, ranges: Tensor | None = None) -> str | None:
    """Why C++ declines these arguments of ``kvpass::pack``, or None."""
    return (
        unsupported_device(new)
        or unsupported_writing(plan, int(new.shape[3]))
        or unsupported_compiler("pack", _source(plan, int(new.shape[3]), new.dtype))
    )


def _source(plan: str, dim: int, dtype: torch.dtype) -> str:
    """That of a plan that keeps all tokens: a first prompt has room for what is packed of it."""
    return tensor_source(str(unbounded(parse_plan(plan))), dim, dtype)


@cache
def _function(plan: str, dim: int, dtype: torch.dtype) -> Callable[[bytes], None]:
    return load_function("pack", _source(plan, dim, dtype))


def pack(new: Tensor, plan: str, ranges: Tensor | None = None) -> list[Tensor]:
    """As `kvpass.ops.pack.pack`, for arguments that are supported."""
    p = parse_plan(plan)
    new = new[:, :, p.skipped(new.shape[2]) :]
    _, heads, count, dim = new.shape
    packed = p.packed(count)
    state = empty_state(new, p, packed)
    if ranges is not None:
        state.qparams.copy_(ranges)
    if new.stride(3) != 1:
        new = new.contiguous()
    _function(plan, dim, new.dtype)(
        tensor_structs(str(unbounded(p)))["pack"].pack(
            *state_numbers(state.tensors, plan),
            new.data_ptr(), new.stride(0), new.stride(1), new.stride(2),
            count, packed, torch.get_num_threads(),
            address(clips_of(p.codec, heads, dim)), address(midpoints_of(p.codec)),
        )
    )  # fmt: skip
    return state.tensors
