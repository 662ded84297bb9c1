"""The unpack kernel in Triton's interpreter against the reference op, bit for bit."""

from __future__ import annotations

import pytest
import torch

from lowering.triton import unpack
from tests.strategies import poisoned
from tests.triton_templates.kernel_reference import keys_like, poison

pytestmark = pytest.mark.interpreter

# Every number of bits along both axes, every group, head dimensions that fill no power of two.
FORMATS = [
    ("fp", 64),
    ("fp", 80),
    *((f"int{bits}.channel{group}", 64) for bits in (2, 4, 8) for group in (32, 64, 128)),
    *((f"int{bits}.token{group}", 128) for bits in (2, 4, 8) for group in (32, 64, 128)),
    ("int2.channel32.fp8", 64),
    ("int8.token32.fp8", 64),
    ("int1.channel32", 128),
    ("int1.5.token128.ternary_in_2bit.fp8", 128),
    ("int1.5.token128.fp8", 128),
    ("int1.5.token64", 64),
    ("int1.5.token160", 160),
    ("int1.5.token32.fp8", 128),
    ("int1.5.channel32", 64),
    ("int3.channel32", 128),
    ("int3.token32", 96),
    ("int3.token64", 256),
    ("int3.channel32.pack11", 64),
    ("int3.token32.pack11", 128),
    ("int3.token40.pack11", 80),
    ("int2.token32.half_split.fp8", 64),
    ("int3.token64.half_split", 128),
    ("int2.channel32", 80),
    ("int4.channel16", 96),
    ("int8.channel64", 112),
    ("int2.token16", 80),
    ("int4.token16", 80),
    ("int8.token40", 80),
    ("int2.token32", 96),
    ("int8.token56", 112),
    ("int4.token48", 192),
    ("int2.channel32", 256),
    ("int8.token256", 256),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def plan_of(codec, window=0, pack_every=128):
    return codec if codec == "fp" else f"{codec}/window={window},pack_every={pack_every}"


def state_of(plan, tokens, dim, dtype=torch.float16, *, batch=1, heads=2, steps=()):
    """A state in poisoned memory; some groups are constant, some values saturate half precision."""
    x = keys_like(batch, heads, tokens, dim, torch.float32)
    x[:, :, ::7], x[..., 3] = 0.75, -2.5
    if dtype != torch.float16:
        x[:, :, 1::5, 8], x[:, :, 1::5, 9] = 3e5, -3e5
    state = torch.ops.kvpass.pack(x.to(dtype), plan)
    for i, n in enumerate(steps):
        torch.ops.kvpass.append(state, keys_like(batch, heads, n, dim, dtype, 10 + i), plan)
    return poison(state, plan)


def unpacked(state, tokens, plan, dtype):
    """What the kernel writes into poisoned memory."""
    assert unpack.unsupported_reason(state, tokens, plan, dtype) is None
    with poisoned():
        return unpack.unpack(state, tokens, plan, dtype)


def expected_of(state, tokens, plan, dtype):
    """The reference's tokens. Triton's interpreter truncates float32 to bf16, a GPU rounds it."""
    if dtype != torch.bfloat16:
        return torch.ops.kvpass.unpack(state, tokens, plan, dtype)
    wide = torch.ops.kvpass.unpack(state, tokens, plan, torch.float32)
    return (wide.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def check(state, plan, dtype, tokens=None):
    tokens = int(state[-1][0, -1]) if tokens is None else tokens
    got = unpacked(state, tokens, plan, dtype)
    expected = expected_of(state, tokens, plan, dtype)
    assert not expected.isnan().any()
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("codec", "dim"), FORMATS)
def test_formats(codec, dim):
    """Packed tokens, then exact ones that go around the ring."""
    plan = plan_of(codec, window=9)
    check(state_of(plan, 300, dim, steps=(5,)), plan, torch.float16)


def test_a_window_that_grows():
    plan = "int4.token32/window=5,pack_every=32,fraction=0.2"
    check(state_of(plan, 300, 64, steps=(5,)), plan, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", ["fp", "int2.token32", "int4.channel32", "int8.channel128"])
def test_dtypes(codec, dtype):
    """Among them numbers whose half-precision minimum saturates."""
    plan = plan_of(codec)
    check(state_of(plan, 150, 64, dtype), plan, dtype)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 256, 257])
@pytest.mark.parametrize("codec", ["fp", "int2.channel32", "int4.channel128", "int4.token32"])
def test_lengths(codec, tokens):
    """One token, an empty packed segment, an empty window, a full capacity (256) and beyond it."""
    plan = plan_of(codec)
    check(state_of(plan, tokens, 64, heads=1), plan, torch.float16)


@pytest.mark.parametrize("pack_every", [1, 3])
@pytest.mark.parametrize("tokens", [1, 20, 64, 130])
def test_token_groups_pack_any_number_of_tokens(tokens, pack_every):
    plan = plan_of("int4.token32", 0, pack_every)
    check(state_of(plan, tokens, 64, steps=(1, 16)), plan, torch.float16)


@pytest.mark.parametrize(
    "plan", ["int2.channel32/window=0,pack_every=32", "int4.token32/window=5,pack_every=7"]
)
def test_the_ring_goes_around(plan):
    state = state_of(plan, 40, 64, heads=1)
    for step in range(9):
        torch.ops.kvpass.append(state, keys_like(1, 1, 1 + 5 * (step % 4), 64, torch.float16), plan)
        check(poison(state, plan), plan, torch.float16)


@pytest.mark.parametrize("codec", ["fp", "int4.channel32", "int4.token32"])
def test_a_shorter_handle(codec):
    """Fewer tokens are wanted than there are: into the window, and into the packed tokens."""
    plan = plan_of(codec)
    state = state_of(plan, 200, 64)
    for tokens in (199, 129, 128, 96, 0):
        check(state, plan, torch.float16, tokens)


@pytest.mark.parametrize("codec", ["fp", "int2.channel32", "int4.token32"])
def test_sequences_of_different_lengths(codec):
    """Each sequence has its own ends; a shorter one is zero beyond its last token."""
    plan = plan_of(codec)
    lengths = (256, 1, 128, 255, 140)
    rows = [state_of(plan, n, 96) for n in lengths]
    state = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    got = unpacked(state, max(lengths), plan, torch.float16)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        expected = torch.ops.kvpass.unpack(row, n, plan, torch.float16)
        assert torch.equal(got[i : i + 1, :, :n], expected)
        assert not got[i, :, n:].any()


def test_another_dtype_is_declined():
    plan = plan_of("int4.channel32")
    assert unpack.unsupported_reason(state_of(plan, 10, 64), 10, plan, torch.float32) == (
        "tokens are wanted as torch.float32, those of the cache are torch.float16"
    )
