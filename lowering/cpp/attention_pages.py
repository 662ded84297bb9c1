"""``kvpass::attention_pages`` in C++: the kernel of ``attention``, to whose tokens tables lead."""

from __future__ import annotations

from typing import Any

import torch

from kvpass.format.parse import parse_plan
from kvpass.ops.attention_pages import PagedArguments
from kvpass.ops.pages import PagedStep
from lowering.cpp.attention import (
    Kernel,
    kernel_function,
    readable_sinks,
    row_size,
    sinks_numbers,
)
from lowering.cpp.constants import unsupported_device, unsupported_plan
from lowering.cpp.library import unsupported_compiler
from lowering.cpp.structs import basis_numbers, pages_numbers, step_numbers, token_numbers
from lowering.support import (
    dense,
    unsupported_extras,
    unsupported_pages,
    unsupported_plans,
    unsupported_window,
)


def _kernel(a: PagedArguments) -> Kernel:
    sides = a.k_plan, a.v_plan, a.q.shape[3], a.q.shape[3], a.q.dtype
    return Kernel(*sides, row_size(_rows(a), *sides), segment=False, paged=True)


def _rows(a: PagedArguments) -> int:
    """Query rows of a KV head."""
    return a.q.shape[1] // a.keys[-1].shape[1]


def unsupported_reason(*args: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention_pages``, or None."""
    a = PagedArguments(*args)
    if reason := unsupported_device(a.q) or unsupported_plans(a.k_plan, a.v_plan):
        return reason
    if a.q.dtype != a.keys[-1].dtype:
        return f"queries are {a.q.dtype}, keys {a.keys[-1].dtype}"
    if reason := unsupported_window(a):
        return reason
    for pages, plan in a.sides:
        if reason := (
            unsupported_extras(parse_plan(plan).codec)
            or unsupported_plan(plan, a.q.shape[3])
            or unsupported_pages(pages, plan)
        ):
            return reason
    kernel = _kernel(a)
    reasons = (constants.unsupported_reason(kernel.lanes) for constants in kernel.constants)
    return next(filter(None, reasons), None) or unsupported_compiler("attention", kernel.source)


def attention_pages(*args: Any) -> None:
    """As `kvpass.ops.attention_pages.attention_pages`, for arguments that are supported."""
    a = PagedArguments(*args)
    q, step = dense(a.q), PagedStep(*a.step)
    k, v = ([*stored, dense(new)] for *stored, new in (a.keys, a.values))
    count, sinks = step.single.shape[0], readable_sinks(a.sinks)
    function, _ = kernel_function(*_kernel(a))
    function(
        *pages_numbers(k, a.k_plan, count),
        *pages_numbers(v, a.v_plan, count),
        *token_numbers(q),
        *basis_numbers(None),
        *(0,) * 6,
        *sinks_numbers(sinks),
        a.out.data_ptr(), _rows(a), 1,
        0, a.window, 0, torch.get_num_threads(), a.scale, a.softcap,
        *step_numbers(step), step.single.data_ptr(),
    )  # fmt: skip
