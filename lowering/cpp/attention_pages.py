"""``kvpass::attention_pages`` in C++: the kernel of ``attention``, to whose tokens tables lead."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from lowering.cpp.attention import Kernel, row_size
from lowering.cpp.constants import unsupported_device, unsupported_plan
from lowering.cpp.library import load_function, unsupported_compiler
from lowering.cpp.structs import attention_struct, pages_numbers, step_numbers, token_numbers
from lowering.support import (
    dense,
    unsupported_extras,
    unsupported_pages,
    unsupported_plans,
)


def _kernel(q: Tensor, keys: list[Tensor], k_plan: str, v_plan: str) -> Kernel:
    sides = k_plan, v_plan, q.shape[3], q.shape[3], q.dtype
    rows = row_size(q.shape[1] // keys[-1].shape[1], *sides)
    return Kernel(*sides, rows, segment=False, paged=True)


def unsupported_reason(
    out: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    step: list[Tensor],
    scale: float,
    k_plan: str,
    v_plan: str,
    softcap: float = 0.0,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention_pages``, or None."""
    if reason := unsupported_device(q) or unsupported_plans(k_plan, v_plan):
        return reason
    for pages, plan in ((keys, k_plan), (values, v_plan)):
        if reason := (
            unsupported_extras(parse_plan(plan).codec)
            or unsupported_plan(plan, q.shape[3])
            or unsupported_pages(pages, plan)
        ):
            return reason
    kernel = _kernel(q, keys, k_plan, v_plan)
    reasons = (constants.unsupported_reason(kernel.lanes) for constants in kernel.constants)
    return next(filter(None, reasons), None) or unsupported_compiler("attention", kernel.source)


@cache
def _function(*kernel: Any) -> Callable[..., None]:
    """The function of a `Kernel` with these fields."""
    made = Kernel(*kernel)
    function = load_function("attention", made.source)
    pack = attention_struct(made.k_plan, made.v_plan, made.segment, made.paged).pack
    return lambda *arguments: function(pack(*arguments))


def attention_pages(
    out: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    step: list[Tensor],
    scale: float,
    k_plan: str,
    v_plan: str,
    softcap: float = 0.0,
) -> None:
    """As `kvpass.ops.attention_pages.attention_pages`, for arguments that are supported."""
    q, single = dense(q), step[3]
    k, v = ([*stored, dense(new)] for *stored, new in (keys, values))
    count, rows = single.shape[0], q.shape[1] // k[-1].shape[1]
    _function(*_kernel(q, keys, k_plan, v_plan))(
        *pages_numbers(k, k_plan, count),
        *pages_numbers(v, v_plan, count),
        *token_numbers(q),
        *(0,) * 6,
        *(0, 0),
        out.data_ptr(), rows, 1,
        0, 0, 0, torch.get_num_threads(), scale, softcap,
        *step_numbers(step), single.data_ptr(),
    )  # fmt: skip
