"""``kvpass::append_pages`` in C++: what is due is encoded in place, of all requests at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.pages import PagedStep
from lowering.cpp.constants import unsupported_device, unsupported_writing
from lowering.cpp.library import packed_function, pages_source, unsupported_compiler
from lowering.cpp.structs import append_pages_struct, pages_numbers, step_numbers
from lowering.support import dense, unsupported_extras, unsupported_pages


def unsupported_reason(pages: list[Tensor], step: list[Tensor], plan: str) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_pages``, or None."""
    new = pages[-1]
    return (
        unsupported_device(new)
        or unsupported_extras(parse_plan(plan).codec)
        or unsupported_writing(plan, new.shape[3])
        or unsupported_pages(pages, plan)
        or unsupported_compiler("append_pages", pages_source(plan, new.shape[3], new.dtype))
    )


@cache
def _function(plan: str, dim: int, dtype: torch.dtype) -> Callable[..., Any]:
    text = pages_source(plan, dim, dtype)
    return packed_function("append_pages", text, append_pages_struct(plan))


def append_pages(pages: list[Tensor], step: list[Tensor], plan: str) -> None:
    """As `kvpass.ops.append_pages.append_pages`, for arguments that are supported."""
    *stored, new = pages
    new, of_step = dense(new), PagedStep(*step)
    _function(plan, new.shape[3], new.dtype)(
        *pages_numbers([*stored, new], plan, 1),
        *step_numbers(of_step),
        of_step.requests.shape[0],
        torch.get_num_threads(),
    )
