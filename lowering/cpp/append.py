"""``kvpass::append`` in C++: what is due is encoded in place, the new tokens join the window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.errors import KernelError
from kvpass.format.rope import Rope
from kvpass.format.state import State
from lowering.cpp.constants import unsupported_device, unsupported_writing
from lowering.cpp.library import tensor_function, unsupported_function
from lowering.cpp.structs import basis_numbers, state_numbers, token_numbers
from lowering.support import dense, row_stride, unsupported_gaps


def unsupported_reason(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
    *,
    segments: int = 1,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append``, or None. ``segments``: ends of a
    sequence in a state of tokens stored as they are, of which the last one is theirs."""
    exact, dim = State.of(state, plan).tokens, int(new.shape[3])
    if new.dtype != exact.dtype:
        return f"new tokens are {new.dtype}, those of the cache {exact.dtype}"
    if cos_sin is not None and cos_sin.dtype not in (new.dtype, torch.float32):
        return f"cosines and sines are {cos_sin.dtype}, new tokens {new.dtype}"
    return (
        unsupported_device(new)
        or unsupported_writing(plan, dim)
        or unsupported_gaps(state, plan)
        or unsupported_function("append", plan, dim, new.dtype, segments)
    )


@cache
def _rope_pairs(rope: str) -> tuple[int, int, int, int]:
    """First channel, number of pairs, channels from one to the next, and to the partner."""
    r = Rope.parse(rope)
    count = r.channels // 2
    return (r.start, count, 1, count) if r.kind == "halves" else (r.start, count, 2, 1)


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
    *,
    segments: int = 1,
    packed_end: int = -1,
    basis: Tensor | None = None,
) -> None:
    """As `kvpass.ops.append.append`, for arguments that are supported.

    ``packed_end``: where packed tokens then end; -1: where the plan says. ``basis``: of new tokens,
    see `kvpass.ops.append_attention.StepArguments`.

    Raises:
        KernelError: if there is no room for the tokens that are due; nothing is written then.
    """
    new, rotary = dense(new), (0,) * 8
    _, _, count, dim = new.shape
    if cos_sin is not None and rope is not None:
        cos_sin = dense(cos_sin)
        strides = row_stride(cos_sin), cos_sin.stride(1)
        wide = cos_sin.dtype == torch.float32
        rotary = (cos_sin.data_ptr(), *strides, wide, *_rope_pairs(rope))
    room = tensor_function("append", plan, dim, new.dtype, segments)(
        *state_numbers(state, plan, dim),
        *token_numbers(new),
        count,
        packed_end,
        torch.get_num_threads(),
        *rotary,
        *basis_numbers(basis),
    )
    if room >= 0:
        raise KernelError(
            f"There is room for {room} packed tokens; {count} new ones do not fit. "
            "Make room with PackedKV.reserve() first."
        )
