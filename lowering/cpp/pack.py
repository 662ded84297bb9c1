"""``kvpass::pack`` in C++: the state of a first prompt."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.pack import empty_state
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
from lowering.layouts import unbounded

_ARGUMENTS = struct.Struct("P6q")


def supports(new: Tensor, plan: str, ranges: Tensor | None = None) -> str | None:
    """Why C++ declines these arguments of ``kvpass::pack``, or None."""
    return (
        decline_device(new)
        or decline_writing(plan, int(new.shape[3]))
        or decline_compiler("pack", **_parameters(plan, int(new.shape[3]), new.dtype))
    )


def _parameters(plan: str, dim: int, dtype: torch.dtype) -> dict[str, object]:
    """Those of a plan that keeps all tokens: a first prompt has room for what is packed of it."""
    return tensor_parameters(str(unbounded(TensorPlan.parse(plan))), dim, dtype)


@cache
def _function(plan: str, dim: int, dtype: torch.dtype) -> Callable[[bytes], None]:
    return load_function("pack", **_parameters(plan, dim, dtype))


def pack(new: Tensor, plan: str, ranges: Tensor | None = None) -> list[Tensor]:
    """As `kvpass.ops.pack.pack`, for arguments that `supports` takes."""
    p = TensorPlan.parse(plan)
    new = new[:, :, p.skipped(new.shape[2]) :]
    _, heads, count, dim = new.shape
    packed = p.packed(count)
    state = empty_state(new, p, packed)
    if ranges is not None:
        state[1].copy_(ranges)
    if new.stride(3) != 1:
        new = new.contiguous()
    _function(plan, dim, new.dtype)(
        state_argument(state, plan)
        + _ARGUMENTS.pack(
            new.data_ptr(), new.stride(0), new.stride(1), new.stride(2),
            count, packed, torch.get_num_threads(),
        )
        + clip_argument(plan, heads, dim)
        + sinks_argument(state, plan)
        + middle_argument(plan)
        + outlier_argument(state, plan)
    )  # fmt: skip
    return state
