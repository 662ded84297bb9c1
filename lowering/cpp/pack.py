"""``kvpass::pack`` in C++: the state of a first prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.state import State, empty_state
from lowering.cpp.constants import unsupported_device, unsupported_writing
from lowering.cpp.library import tensor_function, unsupported_function
from lowering.cpp.structs import state_numbers, token_numbers
from lowering.support import dense, unbounded


def _unbounded(plan: str) -> str:
    """The plan that keeps all tokens: a first prompt has room for what is packed of it."""
    return str(unbounded(parse_plan(plan)))


def unsupported_reason(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::pack``, or None."""
    dim = int(new.shape[3])
    return (
        unsupported_device(new)
        or unsupported_writing(plan, dim)
        or unsupported_function("pack", _unbounded(plan), dim, new.dtype)
    )


def pack(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """As `kvpass.ops.pack.pack`, for arguments that are supported."""
    p = parse_plan(plan)
    new = new[:, :, p.skipped(new.shape[2]) :]
    packed = p.packed(new.shape[2])
    state = empty_state(new, p, packed)
    fill(state, new, packed, ranges)
    return state.tensors


def fill(state: State, new: Tensor, packed: int, ranges: Tensor | None) -> None:
    """As `kvpass.ops.pack.fill`, for arguments that are supported."""
    new, plan = dense(new), str(state.plan)
    _, _, count, dim = new.shape
    if ranges is not None:
        state.qparams.copy_(ranges)
    tensor_function("pack", _unbounded(plan), dim, new.dtype)(
        *state_numbers(state.tensors, plan, dim), *token_numbers(new), count, packed,
        torch.get_num_threads(),
    )  # fmt: skip
