"""What Triton kernels read and write, which Inductor finds out once for equal calls."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest
import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap

from kvpass._torch import FakeTensorMode
from kvpass._torch_inductor import inductor

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


@pytest.mark.parametrize(("calls", "asked"), [(x, 1) for x in EQUAL] + [(x, 2) for x in DIFFERENT])
def test_equal_calls_are_looked_at_once(calls, asked):
    find = Mock(side_effect=lambda *_: object())
    with patch.object(triton_kernel_wrap, "identify_accessed_tensors", find), inductor(None, "tag"):
        found = [triton_kernel_wrap.identify_accessed_tensors(*call, {}) for call in calls]
    assert find.call_count == len(set(found)) == asked
    assert triton_kernel_wrap.identify_accessed_tensors is not find


def test_descriptors_are_always_looked_at():
    find = Mock(side_effect=lambda *_: object())
    with patch.object(triton_kernel_wrap, "identify_accessed_tensors", find), inductor(None, "tag"):
        for _ in range(2):
            triton_kernel_wrap.identify_accessed_tensors(first, arguments(), {"out": "a layout"})
    assert find.call_count == 2
