"""The append and pack kernels in Triton's interpreter against the reference ops, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.format.state import State
from lowering.triton import append, pack
from tests.triton_templates.kernel_reference import keys_like, poison, written

pytestmark = pytest.mark.interpreter

PLANS = [
    "fp",
    "int2.channel32/window=0,pack_every=128",
    "int4.channel32/window=0,pack_every=128",
    "int2.token32/window=128,pack_every=1",
    "int4.token32/window=128,pack_every=1",
    "int2.channel16/window=8,pack_every=32",
    "int4.token16/window=5,pack_every=7",
    "int8.token64/window=0,pack_every=3",
    "int2.channel32/window=0,pack_every=32,fraction=0.2",
    "int4.token32/sinks=3,window=9,pack_every=4,pivotal=0.3",
]


def assert_same(got, expected, plan):
    for a, b in zip(written(got, plan), written(expected, plan), strict=True):
        assert torch.equal(a, b)


def append_steps(got, wanted, steps, plan):
    """Appends steps of so many tokens to both states, by the kernels and by the reference."""
    for i, n in enumerate(steps):
        heads, dim = State.of(wanted, plan).tokens.shape[1::2]
        new = keys_like(1, heads, n, dim, torch.float16, i)
        assert append.unsupported_reason(got, new, plan) is None
        torch.ops.kvpass.append(wanted, new, plan)
        append.append(poison(got, plan), new, plan)
        assert_same(got, wanted, plan)


def special(x):
    """Some groups constant, some values of a size that half precision saturates."""
    x[:, :, ::7] = 0.75
    x[..., 3] = -2.5
    if x.dtype != torch.float16:
        x[:, :, 1::5, 8] = 3e5
        x[:, :, 1::5, 9] = -3e5
    return x


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [1, 131, 270])
def test_pack(plan, tokens):
    x = special(keys_like(1, 2, tokens, 64, torch.float16))
    assert pack.unsupported_reason(x, plan) is None
    assert_same(pack.pack(x, plan), torch.ops.kvpass.pack(x, plan), plan)


@pytest.mark.parametrize(("dim", "codec"), [
    (80, "int2.token16"), (80, "int4.token16"), (96, "int2.token32"), (112, "int2.channel32"),
    (112, "int8.token56"), (192, "int4.token48"), (256, "int8.token256"),
    (64, "int1.5.token64.ternary_in_2bit.fp8"), (64, "int4.channel32.fp8"),
    (80, "int4.channel16.clip0.7"),
    # In base 3: the last plane is shorter, or not, or there is none.
    (128, "int1.5.token128.fp8"), (64, "int1.5.token64"), (160, "int1.5.token160"),
    (32, "int1.5.token32"), (128, "int1.5.token64.fp8"), (80, "int1.5.channel32"),
    # Of channels half a head apart.
    (128, "int2.token64.half_split.fp8.clip0.9"), (64, "int3.token64.half_split"),
    (96, "int4.token32.half_split"),
    (128, "int1.channel32"), (128, "int1.token128.fp8"), (128, "int3.token128"),
    (80, "int3.token40"), (96, "int3.channel16"),
    # 11 in 32 bits: one plane is empty, the last one shorter.
    (80, "int3.token40.pack11"), (128, "int3.channel32.pack11"), (64, "int3.token64.fp8.pack11"),
])  # fmt: skip
def test_head_dims(dim, codec):
    """Among them groups of channels that divide no run of words."""
    plan = f"{codec}/window=9,pack_every=32"
    x = special(keys_like(1, 2, 100, dim, torch.float16))
    got, expected = pack.pack(x, plan), torch.ops.kvpass.pack(x, plan)
    assert_same(got, expected, plan)
    new = special(keys_like(1, 2, 14, dim, torch.float16, 1))
    append.append(got, new, plan)
    torch.ops.kvpass.append(expected, new, plan)
    assert_same(got, expected, plan)


@pytest.mark.parametrize("codec", ["int2.token32.fp8", "int4.token16", "int3.token40"])
def test_clip_of_each_group(codec):
    """Among them groups of channels that divide no run of words."""
    heads, dim = 3, 80 if "token40" in codec else 64
    groups = heads * dim // int(codec.split("token")[1].split(".")[0])
    factors = [round(1 - 0.5 * i / groups, 2) for i in range(groups)]
    plan = f"{codec}.clip{','.join(map(str, factors))}/window=9,pack_every=1"
    x = special(keys_like(2, heads, 60, dim, torch.float16))
    assert pack.unsupported_reason(x, plan).endswith("and no tensor has its factors")
    clip = torch.tensor(factors)
    assert pack.unsupported_reason(x, plan, clip=clip) is None
    got, expected = pack.pack(x, plan, clip=clip), torch.ops.kvpass.pack(x, plan)
    assert_same(got, expected, plan)
    new = special(keys_like(2, heads, 14, dim, torch.float16, 1))
    assert append.unsupported_reason(got, new, plan, clip=clip) is None
    append.append(got, new, plan, clip=clip)
    torch.ops.kvpass.append(expected, new, plan)
    assert_same(got, expected, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "plan", ["int4.channel32/window=0,pack_every=128", "int2.token24/window=9,pack_every=2"]
)
def test_pack_in_other_dtypes_and_head_dims(plan, dtype):
    x = special(keys_like(2, 1, 140, 96 if "token24" not in plan else 192, dtype))
    assert pack.unsupported_reason(x, plan) is None
    assert_same(pack.pack(x, plan), torch.ops.kvpass.pack(x, plan), plan)


def test_pack_of_a_transposed_view():
    x = keys_like(1, 150, 2, 64, torch.float16).transpose(1, 2)
    plan = "int4.channel32/window=0,pack_every=128"
    assert_same(pack.pack(x, plan), torch.ops.kvpass.pack(x, plan), plan)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("plan", [PLANS[1], PLANS[6], "int2.token16.fp8/window=0,pack_every=1"])
def test_a_group_with_what_is_no_finite_number_decodes_to_none(plan, number):
    x = keys_like(1, 2, 128, 64, torch.float16)
    x[0, 1, 60, 7] = number
    states = pack.pack(x, plan), torch.ops.kvpass.pack(x, plan)
    decoded, wanted = (torch.ops.kvpass.unpack(s, 128, plan, torch.float32) for s in states)
    assert wanted[0, 1, 60, 7].isnan()
    assert wanted.isnan().sum() == parse_plan(plan).codec.group
    torch.testing.assert_close(decoded, wanted, rtol=0, atol=0, equal_nan=True)


def test_rounding_to_fp8():
    """Numbers of fp8, what lies halfway to the next one, and the nearest fp32 on both sides."""
    # Subnormals and the next exponent, some in the middle, the last.
    bits = torch.tensor([*range(17), *range(60, 65), *range(123, 127)], dtype=torch.uint8)
    numbers = bits.view(torch.float8_e4m3fn).float()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([numbers, halfway, torch.tensor([449.0, 480.0, 1e30])])
    near = torch.cat([near, near.nextafter(near - 1), near.nextafter(near + 1)])
    near = torch.cat([near, -near[near != 0]]).unsqueeze(1)
    # As the minimum of a constant group, as the scale of three levels, and both.
    x = torch.zeros(1, 1, near.shape[0], 64)
    x[..., :16] = x[..., 32:48] = near
    x[..., 20:21] = x[..., 40:41] = 3 * near.abs()
    plan = "int2.token16.fp8/window=0,pack_every=1"
    assert_same(pack.pack(x, plan), torch.ops.kvpass.pack(x, plan), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_random_steps(plan):
    """Random step sizes up to the largest, across flushes and around the ring."""
    chosen = random.Random(plan)
    prompt = keys_like(1, 1, chosen.choice((1, 100, 127, 128, 200)), 64, torch.float16)
    expected = poison(torch.ops.kvpass.pack(prompt, plan), plan)
    got = [t.clone() for t in expected]
    for step in range(10):
        n = chosen.choice((1, 1, 2, 5, 16))
        if int(expected[-1][0, -1]) + n > 256:
            break
        new = special(keys_like(1, 1, n, 64, torch.float16, step))
        assert append.unsupported_reason(got, new, plan) is None
        torch.ops.kvpass.append(expected, new, plan)
        append.append(got, new, plan)
        assert_same(got, expected, plan)


@pytest.mark.parametrize(("plan", "dim", "rope", "batch"), [
    ("fp", 64, "halves0-64", 2),
    ("int2.channel32/window=0,pack_every=128", 64, "halves0-64", 1),
    ("int4.token20/window=5,pack_every=7", 80, "halves10-50", 2),
    ("int2.token64.fp8/sinks=5,window=4,pack_every=3", 64, "neighbours8-40", 2),
    ("int4.token128/window=4,pack_every=3", 64, "halves0-16", 1),
])  # fmt: skip
def test_keys_are_rotated(plan, dim, rope, batch):
    """Without padding, with it, and where heads are encoded together."""
    expected = torch.ops.kvpass.pack(keys_like(2, 2, 3, dim, torch.float16), plan)
    got = [t.clone() for t in expected]
    for step, n in enumerate((1, 3, 1)):
        new = keys_like(2, n, 2, dim, torch.float16, step).transpose(1, 2)
        rows = keys_like(batch, 1, n, Rope.parse(rope).channels, torch.float32, 9 + step)[:, 0]
        assert append.unsupported_reason(got, new, plan, rows, rope) is None
        torch.ops.kvpass.append(expected, new, plan, rows, rope)
        append.append(got, new, plan, rows, rope)
        assert_same(got, expected, plan)


def test_append_to_several_sequences_and_heads():
    plan = "int2.token32/window=4,pack_every=3"
    x = keys_like(2, 3, 20, 64, torch.bfloat16)
    expected = torch.ops.kvpass.pack(x, plan)
    got = [t.clone() for t in expected]
    for step in range(4):
        new = keys_like(2, 2, 3, 64, torch.bfloat16, step).transpose(1, 2)
        torch.ops.kvpass.append(expected, new, plan)
        append.append(got, new, plan)
        assert_same(got, expected, plan)
