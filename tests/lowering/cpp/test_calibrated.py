"""C++ attention over calibrated formats, and keys before RoPE, against float64."""

from __future__ import annotations

import pytest
import torch

import kvpass.ops.rotary  # noqa: F401  (registers the ops)
from kvpass.cache.encoding import offline_params
from kvpass.cache.residency import TensorPlan
from lowering.cpp.attention import attention, supports
from tests.lowering.cpp.test_attention import query
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import dense_attention, keys_like, relative_error

ops = torch.ops.kvpass
TABLES = {
    2: "-0.75,-0.25,0.125,0.875",
    3: "-0.9,-0.5,-0.3,-0.1,0.05,0.2,0.55,0.95",
    4: "-1.0,-0.8,-0.6,-0.45,-0.3,-0.2,-0.1,-0.02,0.05,0.15,0.25,0.35,0.5,0.6,0.8,1.0",
}
HALVES, NEIGHBOURS = "/rope=halves0-64", "/rope=neighbours8-40"


def nuq(bits: int, axis: str, outliers: int = 0, more: str = "", rest: str = "") -> str:
    sparse = f".outliers{outliers}" if outliers else ""
    residency = "/sinks=1,window=0,flush=1"
    return f"nuq{bits}.{axis}{sparse}.table{TABLES[bits]}{more}{residency}{rest}"


PLANS = {
    "nuq4": (nuq(4, "channel0", rest=HALVES), nuq(4, "token128")),
    "nuq3-1%": (nuq(3, "channel0", 2, rest=HALVES), nuq(3, "token128", 2)),
    "nuq2-qnorm": (
        nuq(2, "channel0", 4, ".qnorm1.25,-0.0625", HALVES),
        nuq(2, "token128", 4, ".qnorm0.75,0.125"),
    ),
    "neighbours": (nuq(3, "channel0", 2, rest=NEIGHBOURS), nuq(3, "token128", 2)),
    "after-rope": (nuq(3, "channel0", 2), nuq(3, "token128")),
    "uniform": (
        "int3.channel0.outliers2/sinks=1,window=20,flush=1" + HALVES,
        "int3.token128.outliers2/sinks=1,window=20,flush=1",
    ),
    "joined": ("fp", "int2.token128/window=32,flush=1"),
    "fp": ("fp" + HALVES, "fp"),
    "kivi": ("int4.channel32/window=0,flush=128" + HALVES, "int4.token32/window=128,flush=1"),
    "sliding": (
        "int3.channel0.outliers2/window=0,flush=1/keep=200" + HALVES,
        "int3.token128/window=0,flush=1/keep=200",
    ),
}


def state_of(plan: str, x: torch.Tensor, rows: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """After a prompt and ``steps`` tokens more, what no token lives in poisoned."""
    p, n = TensorPlan.parse(plan), x.shape[2] - steps
    low, high = x.amin((0, 2)) * 0.8, x.amax((0, 2)) * 0.8
    ranges = offline_params(p.codec, low, high) if p.codec.offline else None
    state = ops.pack(x[:, :, :n].contiguous(), plan, ranges)
    rotary = ops.pack_rotary(rows[:, :n], plan)
    for t in range(n, n + steps):
        ops.append_rotary(rotary, rows[:, t : t + 1], state[-1], plan)
        ops.append(state, x[:, :, t : t + 1].contiguous(), plan)
    if p.rope is not None:
        state.insert(-1, rotary)
    ends = state[-1][0].tolist()
    if p.keep is None:
        if p.rope is not None:
            rotary[:, ends[-1] :] = torch.nan
        if p.codec.outliers:
            # Not a number, in the first channel of the first head.
            state[p.state_names.index("outliers")][:, ends[-2] - p.sinks :] = 0x7E00 << 16
    return state


def states_of(
    plans: tuple[str, str], tokens: int, dtype: torch.dtype, batch: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rope = TensorPlan.parse(plans[0]).rope
    generator = torch.Generator().manual_seed(7)
    half = rope.channels // 2 if rope else 1
    angles = 100 * torch.rand(batch, tokens, half, generator=generator)
    rows = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    keys, values = (keys_like(2, 2, tokens, 64, dtype, seed) for seed in (0, 1))
    steps = min(tokens - 1, 9)
    found = (state_of(p, x, rows, steps) for p, x in zip(plans, (keys, values), strict=True))
    return next(found), next(found)


def check(plans: tuple[str, str], tokens: int, q: torch.Tensor, batch: int = 1) -> None:
    keys, values = states_of(plans, tokens, q.dtype, batch)
    arguments = (q, keys, values, None, 0.125, *plans)
    assert supports(*arguments) is None
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
