"""Calibrated formats, and keys before RoPE: plans, their states, and what must be equal of two."""

from __future__ import annotations

import torch

from kvpass.format.parse import parse_plan
from kvpass.format.quantize import split_outliers, static_qparams
from kvpass.format.state import State
from tests.triton_templates.kernel_reference import keys_like

ops = torch.ops.kvpass
TABLES = {
    2: "-0.75,-0.25,0.125,0.875",
    3: "-0.9,-0.5,-0.3,-0.1,0.05,0.2,0.55,0.95",
    4: "-1.0,-0.8,-0.6,-0.45,-0.3,-0.2,-0.1,-0.02,0.05,0.15,0.25,0.35,0.5,0.6,0.8,1.0",
}
HALVES, NEIGHBOURS = "/rope=halves0-64", "/rope=neighbours8-40"


def nuq(bits: int, axis: str, outliers: int = 0, more: str = "", rest: str = "") -> str:
    sparse = f".outliers{outliers}" if outliers else ""
    retention = "/sinks=1,window=0,pack_every=1"
    return f"nuq{bits}.{axis}{sparse}.codebook{TABLES[bits]}{more}{retention}{rest}"


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
        "int3.channel0.outliers2/sinks=1,window=20,pack_every=1" + HALVES,
        "int3.token128.outliers2/sinks=1,window=20,pack_every=1",
    ),
    "joined": ("fp", "int2.token128/window=32,pack_every=1"),
    "token-scales": (
        "int4.channel32.scale_by_token/window=0,pack_every=32" + HALVES,
        "int2.token32.scale_by_token/window=20,pack_every=1",
    ),
    "fp": ("fp" + HALVES, "fp"),
    "kivi": (
        "int4.channel32/window=0,pack_every=128" + HALVES,
        "int4.token32/window=128,pack_every=1",
    ),
    "sliding": (
        "int3.channel0.outliers2/window=0,pack_every=1/window_size=200" + HALVES,
        "int3.token128/window=0,pack_every=1/window_size=200",
    ),
}


def state_of(plan: str, x: torch.Tensor, rows: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """After a prompt and ``steps`` tokens more, what no token lives in poisoned."""
    p, n = parse_plan(plan), x.shape[2] - steps
    low, high = x.amin((0, 2)) * 0.8, x.amax((0, 2)) * 0.8
    ranges = static_qparams(p.codec, low, high) if p.codec.static_ranges else None
    state = ops.pack(x[:, :, :n].contiguous(), plan, ranges)
    rotary = ops.pack_cos_sin(rows[:, :n], plan)
    for t in range(n, n + steps):
        ops.append_cos_sin(rotary, rows[:, t : t + 1], State(state, p).segment_ends, plan)
        ops.append(state, x[:, :, t : t + 1].contiguous(), plan)
    if p.rope is not None:
        state.append(rotary)
    ends = State(state, p).segment_ends[0].tolist()
    if p.window_size is None:
        if p.rope is not None:
            rotary[:, ends[-1] :] = torch.nan
        if p.codec.outliers:
            # Not a number, in the first channel of the first head.
            State(state, p).outliers[:, ends[-2] - p.sinks :] = 0x7E00 << 16
        if p.codec.scale_by_token:
            State(state, p).token_scales[:, ends[-2] - p.sinks :] = torch.nan
    return state


def states_of(
    plans: tuple[str, str], tokens: int, dtype: torch.dtype, batch: int, dim: int = 64
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rope = parse_plan(plans[0]).rope
    generator = torch.Generator().manual_seed(7)
    half = rope.channels // 2 if rope else 1
    angles = 100 * torch.rand(batch, tokens, half, generator=generator)
    rows = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    keys, values = (keys_like(2, 2, tokens, dim, dtype, seed) for seed in (0, 1))
    steps = min(tokens - 1, 9)
    found = (state_of(p, x, rows, steps) for p, x in zip(plans, (keys, values), strict=True))
    return next(found), next(found)


def same_state(got: list[torch.Tensor], wanted: list[torch.Tensor], plan: str) -> None:
    """Bit for bit, but for the order of outliers, where tokens live."""
    p = parse_plan(plan)
    ends = State(got, p).segment_ends
    assert torch.equal(ends, State(wanted, p).segment_ends)
    *_, packed, total = ends[0].tolist()
    slots = torch.arange(max(0, packed - got[0].shape[2]), packed - p.sinks) % got[0].shape[2]
    exact = torch.arange(packed, total) % p.ring
    for name, a, b in zip((f.name for f in p.layout.own), got, wanted, strict=False):
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
        elif name == "qparams" and p.codec.axis == "token":
            assert torch.equal(a[..., slots], b[..., slots])
        elif name in ("codes", "window"):
            live = slots if name == "codes" else exact
            assert torch.equal(a[:, :, live], b[:, :, live])
        elif name == "qparams":
            groups = packed // p.codec.group if p.codec.group else 1
            assert torch.equal(a[:, :, :groups], b[:, :, :groups])


# Plans of one tensor.
ENCODED = [
    *PLANS["nuq4"],
    *PLANS["nuq3-1%"],
    *PLANS["nuq2-qnorm"],
    *PLANS["uniform"],
    *PLANS["sliding"],
    PLANS["joined"][1],
    "int4.token64.fp8/sinks=2,window=4,pack_every=2",
    nuq(3, "token128", 2, rest="").replace("token128", "token128.fp8"),
    PLANS["kivi"][0],
]
