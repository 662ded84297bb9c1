"""C++ attention over calibrated formats, and keys before RoPE, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowering.cpp.append
import lowering.cpp.pack
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import split_outliers, static_qparams
from kvpass.tensor.packed import PackedKV
from lowering.cpp.attention import attention, unsupported_reason
from tests.calibrated import ENCODED, PLANS, same_state, states_of
from tests.lowering.cpp.test_attention import query
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import dense_attention, keys_like, relative_error

ops = torch.ops.kvpass


def check(plans: tuple[str, str], tokens: int, q: torch.Tensor, batch: int = 1) -> None:
    keys, values = states_of(plans, tokens, q.dtype, batch)
    arguments = (q, keys, values, None, 0.125, *plans)
    assert unsupported_reason(*arguments) is None
    error = relative_error(attention(*arguments), dense_attention(*arguments))
    assert error <= CPP_ATTENTION[q.dtype], error


@pytest.mark.parametrize("name", PLANS)
def test_formats(name: str) -> None:
    for tokens in (1, 130, 300):
        check(PLANS[name], tokens, query(8, 1, 64))


@pytest.mark.parametrize("name", ["nuq4", "neighbours"])
def test_on_other_cpus(name: str, lanes: int) -> None:
    check(PLANS[name], 300, query(8, 1, 64))


@pytest.mark.parametrize("heads", [2, 4, 16])
def test_query_rows(heads: int) -> None:
    check(PLANS["nuq3-1%"], 300, query(heads, 3 if heads == 16 else 1, 64), batch=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    check(PLANS["nuq3-1%"], 300, query(8, 1, 64, dtype), batch=2)


def test_matrices_in_tiles(loops: int) -> None:
    """Of many query rows, in bfloat16."""
    check(PLANS["nuq3-1%"], 300, query(8, 7, 64, torch.bfloat16), batch=2)


@pytest.mark.parametrize("plan", ENCODED, ids=lambda text: text.replace("/", " "))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_encoding_is_the_references(plan: str, dtype: torch.dtype) -> None:
    """Of a prompt, and of steps of one and of several tokens, and of another prompt."""
    cpp, p = torch.ops.kvpass_cpp, parse_plan(plan)
    x = keys_like(2, 2, 400, 64, dtype, 3)
    low, high = x.float().amin((0, 2)) * 0.8, x.float().amax((0, 2)) * 0.8
    ranges = static_qparams(p.codec, low, high) if p.codec.static_ranges else None
    parts = x.split([130, 1, 1, 5, 16, 1, 100, 1, 145], dim=2)
    assert lowering.cpp.pack.unsupported_reason(parts[0], plan, ranges) is None
    got, wanted = (op(parts[0], plan, ranges) for op in (cpp.pack, ops.pack))
    same_state(got, wanted, plan)
    room = p.capacity(400)
    for state in (got, wanted):
        handle = PackedKV(state, replace(p, rope=None), 130, dtype)
        handle.grow("capacity", room)
        state[:] = handle.state
    for part in parts[1:]:
        assert lowering.cpp.append.unsupported_reason(got, part, plan) is None
        cpp.append(got, part, plan)
        ops.append(wanted, part, plan)
        same_state(got, wanted, plan)


def test_a_key_that_is_no_number_is_an_outlier() -> None:
    plan = PLANS["nuq3-1%"][0]
    x = keys_like(1, 2, 40, 64, torch.float32)
    x[0, 1, 20, 7] = torch.nan
    ranges = static_qparams(parse_plan(plan).codec, *(x.nan_to_num().amin((0, 2)),) * 2)
    state = torch.ops.kvpass_cpp.pack(x, plan, ranges)
    channels, values = split_outliers(state[4][0, 19])
    assert values[channels == 64 + 7].isnan().all()
    assert (channels == 64 + 7).sum() == 1
