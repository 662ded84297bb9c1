"""C++ attention over calibrated formats, and keys before RoPE, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowering.cpp.append
import lowering.cpp.pack
from kvpass.cache.encoding import offline_params, split_outliers
from kvpass.cache.packed import PackedKV
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


def same_state(got: list[torch.Tensor], wanted: list[torch.Tensor], plan: str) -> None:
    """Bit for bit, but for the order of outliers, where tokens live."""
    p = TensorPlan.parse(plan)
    assert torch.equal(got[-1], wanted[-1])
    *_, packed, total = got[-1][0].tolist()
    slots = torch.arange(max(0, packed - got[0].shape[2]), packed - p.sinks) % got[0].shape[2]
    exact = torch.arange(packed, total) % p.ring
    for name, a, b in zip(p.own_names, got, wanted, strict=True):
        if name == "outliers":
            (ours, held), (theirs, values) = (split_outliers(x[:, slots]) for x in (a, b))
            assert torch.equal((ours < 0xFFFF).sum(2), (theirs < 0xFFFF).sum(2))
            # Of equal elements either may be the outlier: in bfloat16 many are.
            numbers = [
                torch.where(place < 0xFFFF, value.float(), torch.inf).sort(dim=2).values
                for place, value in ((ours, held), (theirs, values))
            ]
            assert torch.equal(*numbers)
            if got[2].dtype == torch.float32:
                assert torch.equal(ours.sort(dim=2).values, theirs.sort(dim=2).values)
        elif name == "params" and p.codec.axis == "token":
            assert torch.equal(a[..., slots], b[..., slots])
        elif name in ("codes", "window"):
            live = slots if name == "codes" else exact
            assert torch.equal(a[:, :, live], b[:, :, live])
        elif name == "params":
            groups = packed // p.codec.group if p.codec.group else 1
            assert torch.equal(a[:, :, :groups], b[:, :, :groups])


ENCODED = [
    *PLANS["nuq4"],
    *PLANS["nuq3-1%"],
    *PLANS["nuq2-qnorm"],
    *PLANS["uniform"],
    *PLANS["sliding"],
    PLANS["joined"][1],
    "int4.token64.fp8/sinks=2,window=4,flush=2",
    nuq(3, "token128", 2, rest="").replace("token128", "token128.fp8"),
    PLANS["kivi"][0],
]


@pytest.mark.parametrize("plan", ENCODED, ids=lambda text: text.replace("/", " "))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_encoding_is_the_references(plan: str, dtype: torch.dtype) -> None:
    """Of a prompt, and of steps of one and of several tokens, and of another prompt."""
    cpp, p = torch.ops.kvpass_cpp, TensorPlan.parse(plan)
    x = keys_like(2, 2, 400, 64, dtype, 3)
    low, high = x.float().amin((0, 2)) * 0.8, x.float().amax((0, 2)) * 0.8
    ranges = offline_params(p.codec, low, high) if p.codec.offline else None
    parts = x.split([130, 1, 1, 5, 16, 1, 100, 1, 145], dim=2)
    assert lowering.cpp.pack.supports(parts[0], plan, ranges) is None
    got, wanted = (op(parts[0], plan, ranges) for op in (cpp.pack, ops.pack))
    same_state(got, wanted, plan)
    room = p.capacity(400)
    for state in (got, wanted):
        handle = PackedKV(state, replace(p, rope=None), 130, dtype)
        handle.grow(room)
        state[:] = handle.state
    for part in parts[1:]:
        assert lowering.cpp.append.supports(got, part, plan) is None
        cpp.append(got, part, plan)
        ops.append(wanted, part, plan)
        same_state(got, wanted, plan)


def test_a_key_that_is_no_number_is_an_outlier() -> None:
    plan = PLANS["nuq3-1%"][0]
    x = keys_like(1, 2, 40, 64, torch.float32)
    x[0, 1, 20, 7] = torch.nan
    ranges = offline_params(TensorPlan.parse(plan).codec, *(x.nan_to_num().amin((0, 2)),) * 2)
    state = torch.ops.kvpass_cpp.pack(x, plan, ranges)
    places, values = split_outliers(state[4][0, 19])
    assert values[places == 64 + 7].isnan().all()
    assert (places == 64 + 7).sum() == 1
