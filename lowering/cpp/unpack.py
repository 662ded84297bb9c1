"""``kvpass::unpack`` in C++: a packed cache tensor as plain tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.format.state import State
from lowering.cpp.constants import unsupported_device, unsupported_reading
from lowering.cpp.library import tensor_function, unsupported_function
from lowering.cpp.structs import state_numbers
from lowering.support import unsupported_conversion, unsupported_gaps


def unsupported_reason(
    state: Sequence[Tensor], tokens: int | torch.SymInt, plan: str, dtype: torch.dtype
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::unpack``, or None."""
    exact = State.of(state, plan).tokens
    dim = int(exact.shape[3])
    return (
        unsupported_conversion(exact, dtype)
        or unsupported_device(exact)
        or unsupported_reading(plan, dim)
        or unsupported_gaps(state, plan)
        or unsupported_function("unpack", plan, dim, dtype)
    )


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """As `kvpass.ops.unpack.unpack`, for arguments that are supported."""
    s = State.of(state, plan)
    batch, heads, _, dim = s.tokens.shape
    out = s.tokens.new_empty((batch, heads, tokens, dim))
    tensor_function("unpack", plan, dim, dtype)(
        *state_numbers(state, plan, dim), out.data_ptr(), tokens, torch.get_num_threads()
    )
    return out
