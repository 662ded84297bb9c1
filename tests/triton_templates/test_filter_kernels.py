"""The kernels in Triton's interpreter on caches of which a filter retains some packed tokens."""

from __future__ import annotations

import pytest
import torch

from kvpass.format import filters
from kvpass.format.state import State
from lowering.support import unsupported_pages
from lowering.triton import attention, pack, unpack
from tests.strategies import poisoned
from tests.triton_templates.kernel_reference import keys_like, poison, states
from tests.triton_templates.test_attention_kernel import check, query
from tests.triton_templates.test_state_kernels import append_steps

pytestmark = pytest.mark.interpreter

PAIRS = [
    (
        "int2.token32.fp8/sinks=5,window=16,pack_every=1,retained=6,filter=heavy_hitters",
        "int2.token64.fp8.clip0.92/sinks=5,window=16,pack_every=1,retained=20,filter=outliers",
    ),
    # Of keys alone; of values alone; where the window grows.
    (
        "int2.channel16/window=0,pack_every=16,retained=3,filter=outliers",
        "int4.token32/window=9,pack_every=2",
    ),
    ("fp", "int3.token32.pack11/window=16,pack_every=1,retained=5,filter=heavy_hitters"),
    (
        "int4.channel32/window=0,pack_every=32,fraction=0.2,retained=4,filter=heavy_hitters",
        "int1.5.token64/window=16,pack_every=1,retained=1,filter=outliers",
    ),
]
# Packed tokens fewer than retained ones, several tiles of them, and steps in which some are due.
LENGTHS = [(3, 16, 16, 16, 2), (300, 1, 1), (150, 16, 9, 1, 1)]


@pytest.mark.parametrize("plan", [*PAIRS[0], PAIRS[1][0], PAIRS[2][1], PAIRS[3][0]])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_state_is_the_references(plan, lengths):
    """With ties: some tokens come twice."""
    prompt, *steps = lengths
    x = keys_like(1, 2, prompt, 64, torch.float16)
    x[:, :, prompt // 2 :: 2] = x[:, :, : len(range(prompt // 2, prompt, 2))]
    assert pack.unsupported_reason(x, plan) is None
    got, wanted = pack.pack(x, plan), torch.ops.kvpass.pack(x, plan)
    append_steps(got, wanted, steps, plan)
    assert (State.of(got, plan).positions >= 0).any()
    total = int(poison(got, plan)[-1][0, -1])
    for tokens in (total, total - 1):
        assert unpack.unsupported_reason(got, tokens, plan, torch.float16) is None
        with poisoned():
            decoded = unpack.unpack(got, tokens, plan, torch.float16)
        assert torch.equal(decoded, torch.ops.kvpass.unpack(got, tokens, plan, torch.float16))


@pytest.mark.parametrize("plans", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention(plans, dtype, lengths):
    prompt, *steps = lengths
    keys, values = states(plans, prompt, steps=steps, dtype=dtype)
    q, total = query(1, 4, steps[-1], 64, dtype), prompt + sum(steps)
    check(plans, keys, values, q)
    mask = torch.randn(1, 4, steps[-1], total, generator=torch.Generator().manual_seed(0))
    check(plans, keys, values, q, mask, causal=True, window=total - 2, softcap=6.0)


def test_what_is_declined(monkeypatch):
    monkeypatch.setitem(filters.FILTERS, "odd", lambda tokens: tokens[..., 0])
    plan = "int2.token64/window=16,pack_every=1,retained=2,filter=odd"
    reason = pack.unsupported_reason(keys_like(1, 1, 40, 64, torch.float16), plan)
    assert reason == "filter 'odd' is none of heavy_hitters, outliers"
    assert unsupported_pages([], plan) == f"{plan} has retained tokens, which are in no pages"
    plan = (
        "nuq2.token64.codebook-1.0,-0.2,0.2,1.0/window=16,pack_every=1,retained=2,filter=outliers"
    )
    keys, values = states((plan, "fp"), 40)
    reason = attention.unsupported_reason(query(1, 1, 1, 64), keys, values, None, 1.0, plan, "fp")
    assert reason == f"{plan} has to be decoded; that is not supported with retained tokens"


def test_11_codes_in_32_bits_are_not_decoded_beside_a_codebook():
    plans = (
        "nuq2.token64.codebook-1.0,-0.2,0.2,1.0/window=0,pack_every=1",
        "int3.token64.pack11/window=0,pack_every=1",
    )
    keys, values = states(plans, 40)
    reason = attention.unsupported_reason(query(1, 1, 1, 64), keys, values, None, 1.0, *plans)
    assert reason == f"{plans[1]} has to be decoded; that is not supported of 11 codes in 32 bits"
