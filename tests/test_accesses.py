"""What Triton kernels read and write, which Inductor finds out once for equal calls."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap

from kvpass._torch import FakeTensorMode
from kvpass._torch_inductor import accesses_finder, inductor

MODE = FakeTensorMode()


def fake(dtype: torch.dtype = torch.float16) -> torch.Tensor:
    with MODE:
        return torch.empty(8, dtype=dtype)


@triton.jit
def first(out, count):
    pass


@triton.jit
def second(out, count):
    pass


def tuned(**constants: int):
    """As `torch.compile` has it where a call gives a number of warps."""
    config = triton.Config(constants, num_warps=8)
    return triton.runtime.Autotuner(first, first.arg_names, [config], [], None, None)


def arguments(out: torch.Tensor | None = None, count: object = 1) -> dict[str, object]:
    return {"out": fake() if out is None else out, "count": count}


EQUAL = [
    ((first, arguments()), (first, arguments())),
    ((first, arguments()), (tuned(), arguments())),
    ((first, arguments(count=3)), (tuned(count=3), {"out": fake()})),
]
DIFFERENT = [
    ((first, arguments()), (second, arguments())),
    ((first, arguments()), (first, arguments(fake(torch.float32)))),
    ((first, arguments()), (first, arguments(count=2))),
    ((first, arguments()), (first, arguments(count=True))),
    ((tuned(count=3), {"out": fake()}), (tuned(count=4), {"out": fake()})),
    # Nobody knows what else may matter of these.
    ((first, arguments(torch.empty(8))), (first, arguments(torch.empty(8)))),
    ((first, arguments(count=(1, 2))), (first, arguments(count=(1, 2)))),
]


def looked_at(*calls: tuple[object, ...]) -> tuple[int, list[object]]:
    """How many of these calls Inductor looks at, and what it is told of each."""
    finder, find = accesses_finder(), Mock(side_effect=lambda *_: object())
    with patch.object(triton_kernel_wrap, finder, find):
        with inductor(None, "tag"):
            found = [getattr(triton_kernel_wrap, finder)(*call) for call in calls]
        assert getattr(triton_kernel_wrap, finder) is find
    return find.call_count, found


@pytest.mark.parametrize(("calls", "asked"), [(x, 1) for x in EQUAL] + [(x, 2) for x in DIFFERENT])
def test_equal_calls_are_looked_at_once(calls, asked):
    count, found = looked_at(*((*call, {}) for call in calls))
    assert count == len(set(found)) == asked


def test_descriptors_are_always_looked_at():
    count, _ = looked_at(*[(first, arguments(), {"out": "a layout"})] * 2)
    assert count == 2
