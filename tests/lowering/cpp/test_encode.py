"""Generated C++ pack, append and unpack against their references, with poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvpass.errors import KernelError
from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.format.state import empty_state
from kvpass.ops.append import append as reference_append
from kvpass.ops.pack import pack as reference_pack
from kvpass.ops.unpack import unpack as reference_unpack
from lowering.cpp import append, pack, unpack
from tests.strategies import randn
from tests.triton_templates.kernel_reference import keys_like, poison, written

PLANS = (
    "fp",
    "int2.channel32/window=0,pack_every=128",
    "int4.channel32/window=40,pack_every=64",
    "int8.channel24/window=0,pack_every=24",
    "int2.token16/window=128,pack_every=1",
    "int4.token40/window=0,pack_every=5",
    "int8.token80/window=7,pack_every=2",
    "int2.token16.fp8.clip0.92/window=7,pack_every=2",
    "int1.channel32.clip0.5/window=0,pack_every=64",
    "int1.5.channel24.ternary_in_2bit.fp8/window=0,pack_every=24",
    "int1.5.token20.fp8.clip0.92/window=7,pack_every=2",
    "int1.5.channel24/window=0,pack_every=24",
    "int3.channel32/window=0,pack_every=128",
    "int3.token40.fp8.clip0.92/window=7,pack_every=2",
    "int2.token16.fp8.clip0.92,1.0,0.5,0.7,0.8,0.9,0.6,1.0,0.95,0.55/sinks=5,window=7,pack_every=2",
    "int4.channel24/sinks=50,window=3,pack_every=24",
    "int2.token16.half_split.fp8/window=7,pack_every=1",
    "int3.channel24.pack11/window=0,pack_every=24",
    "int3.token40.fp8.clip0.92.pack11/window=7,pack_every=2",
)
# Of each kind one, for other dtypes and for CPUs with other vectors: every variant is compiled.
KINDS = ("fp", PLANS[2], PLANS[13], PLANS[14])
STEPS = (1, 16, 40, 1, 3, 130, 16, 16, 16, 16, 16, 16, 16, 16, 1)


def same(got, wanted, plan):
    for a, b in zip(written(got, plan), written(wanted, plan), strict=True):
        assert torch.equal(a, b)


def tokens_like(n, seed, dtype, dim=80):
    """Some channels and some tokens are constant; the layout is a model's."""
    x = keys_like(2, 2, n, dim, torch.float32, seed)
    x[..., :3] = 1.5
    x[:, 1:, ::3] = -2.0
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("plan", PLANS[14:16])
def test_sinks_are_filled_in_steps(plan):
    for prompt, *steps in ((1, 1, 1, 2, 1, 1), (3, 16, 16, 16, 16, 1), (4, 130, 1), (49, 1, 1)):
        x = tokens_like(prompt, 1, torch.float32)
        got, wanted = pack.pack(x, plan), reference_pack(x, plan)
        for i, n in enumerate(steps):
            same(got, wanted, plan)
            new = tokens_like(n, 2 + i, torch.float32)
            append.append(got, new, plan)
            reference_append(wanted, new, plan)
        same(got, wanted, plan)
        total = prompt + sum(steps)
        poison(got, plan)
        decoded = unpack.unpack(got, total, plan, torch.float32)
        ulp = 2 * torch.finfo(torch.float32).eps
        assert_close(
            decoded, reference_unpack(wanted, total, plan, torch.float32), rtol=ulp, atol=ulp
        )


def with_room(state, plan, tokens):
    """The same state in larger, poisoned memory."""
    roomy = empty_state(
        torch.empty(2, 2, 1, 80, dtype=state[0].dtype), parse_plan(plan), tokens
    ).tensors
    if plan == "fp":
        roomy[0][:, :, : state[0].shape[2]] = state[0]
        return [roomy[0], state[1]]
    codes, params, *exact = state
    roomy[0][:, :, : codes.shape[2]] = codes
    roomy[1][:, :, : params.shape[2], : params.shape[3]] = params
    return poison([roomy[0], roomy[1], *exact], plan)


@pytest.mark.parametrize("plan", PLANS)
def test_pack_and_append_are_exact(plan):
    check_exact(plan, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", KINDS)
def test_dtypes(plan, dtype):
    check_exact(plan, dtype)


@pytest.mark.parametrize("plan", KINDS)
def test_lanes(plan, lanes):
    check_exact(plan, torch.float32)


def check_exact(plan, dtype):
    for tokens in (1, 39, 300, 1100):
        x = tokens_like(tokens, 1, dtype)
        assert pack.unsupported_reason(x, plan) is None
        got, wanted = pack.pack(x, plan), reference_pack(x, plan)
        same(got, wanted, plan)
    got, wanted = with_room(got, plan, 2000), with_room(wanted, plan, 2000)
    for i, n in enumerate(STEPS):
        new = tokens_like(n, 50 + i, dtype)
        assert append.unsupported_reason(got, new, plan) is None
        append.append(got, new, plan)
        reference_append(wanted, new, plan)
        same(got, wanted, plan)
    total = int(got[-1][0, -1])
    assert unpack.unsupported_reason(got, total, plan, dtype) is None
    for tokens in (total, total - 3, 1):
        tokens = max(tokens, int(got[-1][0, 0]) if plan != "fp" else 1)
        decoded = unpack.unpack(got, tokens, plan, dtype)
        # One rounding where the reference may round a product and a sum.
        ulp = 2 * torch.finfo(dtype).eps
        assert_close(decoded, reference_unpack(got, tokens, plan, dtype), rtol=ulp, atol=ulp)


@pytest.mark.parametrize(("plan", "dtype", "rope", "wide", "batch"), [
    (KINDS[0], torch.float32, "halves0-80", True, 2),
    (KINDS[1], torch.bfloat16, "halves0-20", False, 1),
    (KINDS[2], torch.float32, "halves10-80", True, 1),
    (KINDS[3], torch.float32, "neighbours8-48", True, 2),
    (KINDS[1], torch.float16, "neighbours0-80", True, 1),
])  # fmt: skip
def test_keys_are_turned_exactly(plan, dtype, rope, wide, batch):
    """Also where less than a vector is left, and where cosines lie apart."""
    got = pack.pack(tokens_like(140, 1, dtype), plan)
    got = with_room(got, plan, 400)
    wanted = [t.clone() for t in got]
    for i, n in enumerate((1, 16, 40, 1)):
        x = tokens_like(n, 70 + i, dtype)
        rows = randn(batch, n, 2 * Rope.parse(rope).channels, seed=i)
        rows = rows.to(torch.float32 if wide else dtype)[..., : Rope.parse(rope).channels]
        assert append.unsupported_reason(got, x, plan, rows, rope) is None
        append.append(got, x, plan, rows, rope)
        reference_append(wanted, x, plan, rows, rope)
        same(got, wanted, plan)


@pytest.mark.parametrize(("bits", "dim"), [(1.5, 16), (1.5, 64), (1.5, 128), ("3", 64)])
def test_the_last_plane_is_not_full(bits, dim):
    plan = f"int{bits}.token16{'.pack11' * (bits == '3')}/window=0,pack_every=1"
    x = tokens_like(40, 1, torch.float32, dim)
    got, wanted = pack.pack(x, plan), reference_pack(x, plan)
    same(got, wanted, plan)
    decoded = unpack.unpack(got, 40, plan, torch.float32)
    assert_close(decoded, reference_unpack(wanted, 40, plan, torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", ["fp", "int4.channel32/window=0,pack_every=32"])
def test_without_room_nothing_is_written(plan):
    x = tokens_like(300, 0, torch.float32)
    state = pack.pack(x, plan)
    before = [t.clone() for t in state]
    with pytest.raises(KernelError, match="room for 384 packed tokens; 500 new ones"):
        append.append(state, tokens_like(500, 1, torch.float32), plan)
    for a, b in zip(state, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_extreme_values_saturate_as_in_the_reference():
    x = tokens_like(64, 0, torch.float32)
    x[:, :, 5], x[:, :, 40, 7] = 1e6, -3e38
    x[:, :, 9, 3] = 1e-7
    for plan in PLANS[1:]:
        same(pack.pack(x, plan), reference_pack(x, plan), plan)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("plan", [*PLANS[1:5], PLANS[14], PLANS[16]])
def test_a_group_with_what_is_no_finite_number_decodes_to_none(plan, number):
    x = tokens_like(300, 0, torch.float32)
    x[1, 1, 60, 7] = number
    got, wanted = pack.pack(x, plan), reference_pack(x, plan)
    decoded, expected = (reference_unpack(s, 300, plan, torch.float32) for s in (got, wanted))
    assert decoded[1, 1, 60, 7].isnan()
    assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    codec = parse_plan(plan).codec
    assert decoded.isnan().sum() == codec.group


def test_what_is_declined():
    x = tokens_like(40, 0, torch.float32)
    state = reference_pack(x, PLANS[1])
    assert append.unsupported_reason(state, x.half(), PLANS[1]) == (
        "new tokens are torch.float16, those of the cache torch.float32"
    )
    assert pack.unsupported_reason(x.double(), PLANS[1]).startswith(
        "torch.float64 is not supported"
    )
    assert unpack.unsupported_reason(state, 40, PLANS[1], torch.float16) == (
        "tokens are wanted as torch.float16, those of the cache are torch.float32"
    )
    assert pack.unsupported_reason(x.to("meta"), PLANS[1]) == "device meta is not a CPU"


def test_tables_of_levels_are_written_in_calibrated_ranges_only():
    plan = "nuq2.channel4.codebook-1.0,-0.2,0.3,1.0/window=0,pack_every=4"
    assert "calibrated ranges only" in str(pack.unsupported_reason(torch.randn(1, 2, 8, 16), plan))
