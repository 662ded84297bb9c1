"""Generated C++ on caches that keep only the last tokens, in a ring, in poisoned memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from kvpass.ops.append import append as reference_append
from kvpass.ops.pack import pack as reference_pack
from kvpass.ops.unpack import unpack as reference_unpack
from lowering.cpp import append, attention, pack, unpack
from lowering.cpp.library import tensor_source
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates import kernel_reference
from tests.triton_templates.kernel_reference import (
    dense_attention,
    keys_like,
    kivi,
    poison,
    relative_error,
    written,
)

states = partial(kernel_reference.states, heads=2, batch=2, dtype=torch.float32)

# Less than a tile, within a tile, and more than a prefill of 1000 tokens needs to go around once.
KEPT = (37, 200, 450)
# A prompt and steps: within the window, out of it, around the ring many times at once and in steps.
LENGTHS = ((5, 1), (150, 16), (900, 1, 1), (900, 16, 3), (30, 1000, 1), (40, *(130, 16) * 9, 5))


def sliding(plans, keep):
    return tuple(f"{plan}/window_size={keep}" for plan in plans)


@pytest.mark.parametrize(
    "plan",
    [
        "fp",
        "int2.channel32/window=0,pack_every=128",
        "int8.channel24/window=0,pack_every=24",
        "int2.token16/window=128,pack_every=1",
        "int4.token40/window=0,pack_every=5",
    ],
)
def test_state_is_the_references(plan):
    dtype = torch.float32
    for keep in KEPT:
        text = f"{plan}/window_size={keep}"
        for prompt, *steps in LENGTHS:
            x = keys_like(2, 2, prompt, 80, dtype)
            got, wanted = pack.pack(x, text), reference_pack(x, text)
            for i, n in enumerate(steps):
                new = keys_like(2, 2, n, 80, dtype, i)
                assert append.unsupported_reason(got, new, text) is None
                append.append(poison(got, text), new, text)
                reference_append(wanted, new, text)
                for a, b in zip(written(got, text), written(wanted, text), strict=True):
                    assert torch.equal(a, b)
            poison(got, text)
            for tokens in (min(keep, int(got[-1][0, -1])), 1):
                assert unpack.unsupported_reason(got, tokens, text, dtype) is None
                decoded = unpack.unpack(got, tokens, text, dtype)
                # One rounding where the reference may round a product and a sum.
                ulp = 2 * torch.finfo(dtype).eps
                expected = reference_unpack(got, tokens, text, dtype)
                assert_close(decoded, expected, rtol=ulp, atol=ulp)


def check(plans, keys, values, n, mask=None, dtype=torch.float32, **variant):
    g = torch.Generator().manual_seed(n)
    q = torch.randn(2, n, 8, 64, generator=g).to(dtype).transpose(1, 2)
    arguments = (q, keys, values, mask, 0.125, *plans)
    assert attention.unsupported_reason(*arguments, **variant) is None
    got = attention.attention(*arguments, **variant)
    error = relative_error(got, dense_attention(*arguments, **variant))
    assert error <= CPP_ATTENTION[dtype], error


@pytest.mark.parametrize("keep", KEPT)
def test_attention(keep, lanes):
    """Positions among keys and values differ where prompts drop different whole flushes."""
    plans = sliding(kivi(2), keep)
    for prompt, *steps in LENGTHS:
        check(plans, *states(plans, prompt, steps=steps), steps[-1])


@pytest.mark.parametrize(
    "plans",
    [
        ("fp", "fp"),
        ("int4.token32/window=40,pack_every=1", "int4.token64/window=8,pack_every=4"),
        ("int2.channel48/window=32,pack_every=48", "fp"),
    ],
    ids=str,
)
def test_codecs(plans):
    for keep in KEPT:
        kept = sliding(plans, keep)
        for prompt, *steps in LENGTHS:
            check(kept, *states(kept, prompt, steps=steps), steps[-1])


@pytest.mark.parametrize("keep", KEPT)
def test_masks_and_variants(keep):
    plans = sliding(kivi(2), keep)
    for prompt, *steps in LENGTHS:
        keys, values = states(plans, prompt, steps=steps)
        n, length = steps[-1], min(int(keys[-1][0, -1]), keep + steps[-1])
        torch.manual_seed(0)
        shown = torch.rand(2, 8, n, length) > 0.3
        for mask in (shown, torch.randn(1, 8, n, length), shown[:, :1, :1, :]):
            check(plans, keys, values, n, mask)
        check(plans, keys, values, n, causal=True)
        variant = {"causal": True, "softcap": 6.0, "sinks": torch.linspace(-2, 6, 8)}
        for window in (1, keep // 3, keep + 1):
            check(plans, keys, values, n, shown, window=window, **variant)


def test_bf16():
    plans = sliding(kivi(4), 200)
    keys, values = states(plans, 900, steps=(16, 3), dtype=torch.bfloat16)
    check(plans, keys, values, 3, dtype=torch.bfloat16, causal=True)


def test_matrices_in_tiles(loops):
    """Of many query rows, in bfloat16."""
    plans = sliding(kivi(4), 200)
    keys, values = states(plans, 900, steps=(3, 16), dtype=torch.bfloat16)
    check(plans, keys, values, 16, dtype=torch.bfloat16, causal=True)


def test_kernels_do_not_depend_on_how_many_tokens_are_kept_or_have_room():
    plan = kivi(2)[0]
    made = [
        tensor_source(plan + kept, 64, torch.float32)
        for kept in ("/window_size=5", "/window_size=600", "/window_size=8/room=9")
    ]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("plan", ["fp", *kivi(2)])
def test_what_a_static_cache_has_not_written_is_zero(plan):
    text = f"{plan}/window_size=699/room=700"
    for tokens in (1, 130, 512, 700):
        # All 700 tokens count, as in a step of one token.
        state = poison(reference_pack(keys_like(2, 2, tokens, 64, torch.float32), text), text, 1)
        assert unpack.unsupported_reason(state, 700, text, torch.float32) is None
        decoded = unpack.unpack(state, 700, text, torch.float32)
        assert not decoded[:, :, tokens:].any()
        assert_close(decoded, reference_unpack(state, 700, text, torch.float32), rtol=0, atol=1e-6)
