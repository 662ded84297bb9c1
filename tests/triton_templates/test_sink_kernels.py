"""The kernels in Triton's interpreter on caches whose first tokens, sinks, stay exact."""

from __future__ import annotations

import pytest
import torch

from lowering.triton import attention, pack, unpack
from tests.strategies import poisoned
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import (
    dense_attention,
    keys_like,
    poison,
    relative_error,
    states,
)
from tests.triton_templates.test_attention_kernel import check, query
from tests.triton_templates.test_state_kernels import append_steps, assert_same

pytestmark = pytest.mark.interpreter

PAIRS = [
    (
        "int2.token32.fp8.clip0.92/sinks=5,window=16,pack_every=1",
        "int1.5.token64.ternary_in_2bit.fp8/sinks=5,window=16,pack_every=1",
    ),
    # More sinks than a tile has tokens.
    (
        "int4.channel32/sinks=40,window=0,pack_every=128",
        "int4.token32.fp8/sinks=40,window=9,pack_every=2",
    ),
    ("fp", "int2.token64/sinks=5,window=16,pack_every=1"),
    ("int2.channel16/sinks=1,window=0,pack_every=16", "fp"),
]
# A prompt and steps: fewer tokens than sinks, steps that fill them, packed tokens that fill all
# their room, and a pack_every.
LENGTHS = [(1,), (4, 16, 16, 16, 1), (5 + 256 + 16,), (160, 9, 1)]


@pytest.mark.parametrize("plan", [PAIRS[0][0], *PAIRS[1]])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_state_is_the_references(plan, lengths):
    prompt, *steps = lengths
    x = keys_like(1, 1, prompt, 64, torch.float16)
    assert pack.unsupported_reason(x, plan) is None
    got, wanted = pack.pack(x, plan), torch.ops.kvpass.pack(x, plan)
    assert_same(got, wanted, plan)
    append_steps(got, wanted, steps, plan)
    sinks, packed, total = poison(got, plan)[-1][0].tolist()
    # Into the window, after whole groups of packed tokens, and into the sinks.
    shorter = () if steps else (max(packed, total - 1), min(total, sinks + 64), min(total, 3))
    for tokens in {total, *shorter}:
        assert unpack.unsupported_reason(got, tokens, plan, torch.float16) is None
        with poisoned():
            decoded = unpack.unpack(got, tokens, plan, torch.float16)
        assert torch.equal(decoded, torch.ops.kvpass.unpack(got, tokens, plan, torch.float16))


@pytest.mark.parametrize("plans", PAIRS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention(plans, lengths):
    prompt, *steps = lengths
    n = steps[-1] if steps else 1
    keys, values = states(plans, prompt, steps=steps)
    q, total = query(1, 4, n, 64), prompt + sum(steps)
    check(plans, keys, values, q)
    if prompt == 4:
        mask = torch.randn(1, 4, n, total, generator=torch.Generator().manual_seed(0))
        check(plans, keys, values, q, mask, causal=True, window=total - 2, softcap=6.0)


@pytest.mark.parametrize("window", [1, 97])
def test_a_window_that_sees_some_of_the_sinks_or_none(window):
    keys, values = states(PAIRS[0], 97, steps=(3,))
    check(PAIRS[0], keys, values, query(1, 4, 3, 64), causal=True, window=window)


@pytest.mark.parametrize("plans", PAIRS[:2], ids=str)
def test_sequences_of_different_lengths(plans):
    rows = [states(plans, n) for n in (3, 100, 45)]
    both = zip(*rows, strict=True)
    keys, values = ([torch.cat(parts) for parts in zip(*s, strict=True)] for s in both)
    q = query(3, 4, 1, 64)
    got = attention.attention(q, keys, values, None, 0.125, *plans)
    for i, row in enumerate(rows):
        expected = dense_attention(q[i : i + 1], *row, None, 0.125, *plans)
        assert relative_error(got[i : i + 1], expected) <= TRITON_ATTENTION[torch.float16]


def test_other_sinks_of_values_are_declined():
    plans = PAIRS[0][0], PAIRS[0][1].replace("sinks=5", "sinks=4")
    assert (
        attention.unsupported_reason(query(1, 1, 1, 64), *states(plans, 20), None, 0.125, *plans)
        == f"keys {plans[0]} and values {plans[1]} do not have the same sinks"
    )
