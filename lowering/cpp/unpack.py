"""``kvpass::unpack`` in C++: a packed cache tensor as plain tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lowering.cpp.constants import decline_device, decline_reading
from lowering.cpp.library import decline_compiler, load_function, tensor_source
from lowering.cpp.structs import state_numbers, tensor_structs
from lowering.triton.layouts import decline_conversion, decline_gaps, exact_tokens


def supports(
    state: Sequence[Tensor], tokens: int | torch.SymInt, plan: str, dtype: torch.dtype
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::unpack``, or None."""
    exact = exact_tokens(state, plan)
    return (
        decline_conversion(exact, dtype)
        or decline_device(exact)
        or decline_reading(plan, int(exact.shape[3]))
        or decline_gaps(state, plan)
        or decline_compiler("unpack", tensor_source(plan, int(exact.shape[3]), dtype))
    )


@cache
def _function(plan: str, dim: int, dtype: torch.dtype) -> Callable[[bytes], None]:
    return load_function("unpack", tensor_source(plan, dim, dtype))


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """As `kvpass.ops.unpack.unpack`, for arguments that `supports` takes."""
    exact = exact_tokens(state, plan)
    batch, heads, _, dim = exact.shape
    out = exact.new_empty((batch, heads, tokens, dim))
    _function(plan, dim, dtype)(
        tensor_structs(plan)["unpack"].pack(
            *state_numbers(state, plan), out.data_ptr(), tokens, torch.get_num_threads()
        )
    )
    return out
