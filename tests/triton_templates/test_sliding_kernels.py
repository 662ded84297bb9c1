"""The kernels in Triton's interpreter on caches that keep only the last tokens, in a ring."""

from __future__ import annotations

import pytest
import torch

from lowering.triton import append, attention, pack, unpack
from lowering.triton.attention import unsupported_reason
from lowering.triton.layouts import layout_of
from tests.strategies import poisoned
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import (
    dense_attention,
    keys_like,
    kivi,
    poison,
    relative_error,
    states,
    written,
)

pytestmark = pytest.mark.interpreter

# Less than a tile, within a tile, and more than two of them.
KEPT = (37, 200, 300)
# A prompt and steps: within the window, out of it, around the ring many times at once and in steps.
LENGTHS = ((5, 1), (150, 16), (900, 1, 1), (30, 1000, 3), (40, *(130, 16) * 6, 5))


def sliding(plans, keep):
    return tuple(f"{plan}/window_size={keep}" for plan in plans)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        "fp",
        "int2.channel32/window=0,pack_every=128",
        "int4.channel16/window=8,pack_every=48",
        "int2.token32/window=128,pack_every=1",
        "int4.token16/window=5,pack_every=7",
    ],
)
def test_state_is_the_references(plan, lengths):
    for keep in (37, 200):
        text, (prompt, *steps) = f"{plan}/window_size={keep}", lengths
        x = keys_like(1, 2, prompt, 64, torch.float16)
        got, wanted = pack.pack(x, text), torch.ops.kvpass.pack(x, text)
        for i, n in enumerate(steps):
            new = keys_like(1, 2, n, 64, torch.float16, i)
            torch.ops.kvpass.append(wanted, new, text)
            if append.unsupported_reason(got, new, text) is None:
                append.append(poison(got, text), new, text)
            else:
                got = [t.clone() for t in wanted]
            for a, b in zip(written(got, text), written(wanted, text), strict=True):
                assert torch.equal(a, b)
        poison(got, text)
        for tokens in (min(keep, int(got[-1][0, -1])), 1):
            assert unpack.unsupported_reason(got, tokens, text, torch.float16) is None
            with poisoned():
                decoded = unpack.unpack(got, tokens, text, torch.float16)
            assert torch.equal(decoded, torch.ops.kvpass.unpack(got, tokens, text, torch.float16))


def check(plans, keys, values, n, mask=None, dtype=torch.float16, heads=4, **variant):
    g = torch.Generator().manual_seed(n)
    batch, dim = keys[0].shape[0], 64
    q = torch.randn(batch, heads, n, dim, generator=g).to(dtype)
    arguments = (q, keys, values, mask, dim**-0.5, *plans)
    assert unsupported_reason(*arguments, **variant) is None
    got = attention.attention(*arguments, **variant)
    error = relative_error(got, dense_attention(*arguments, **variant))
    assert error <= TRITON_ATTENTION[dtype], error


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "plans",
    [
        kivi(2),
        ("fp", "fp"),
        ("int4.token32/window=40,pack_every=1", "int4.token64/window=8,pack_every=4"),
        ("int2.channel32/window=32,pack_every=32", "fp"),
        ("fp", "int8.token16/window=8,pack_every=4"),
    ],
    ids=str,
)
def test_attention(plans, lengths):
    """Positions among keys and values differ where prompts drop different whole flushes."""
    for keep in KEPT:
        kept, (prompt, *steps) = sliding(plans, keep), lengths
        check(kept, *states(kept, prompt, steps=steps), steps[-1])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks_and_variants(lengths):
    for keep in (37, 200) if sum(lengths) > 200 else (37,):
        plans, (prompt, *steps) = sliding(kivi(2), keep), lengths
        keys, values = states(plans, prompt, steps=steps)
        n, length = steps[-1], min(int(keys[-1][0, -1]), keep + steps[-1])
        torch.manual_seed(0)
        shown = torch.rand(1, 4, n, length) > 0.3
        for mask in (shown, torch.randn(1, 4, n, length)):
            check(plans, keys, values, n, mask)
        check(plans, keys, values, n, causal=True)
        variant = {"causal": True, "softcap": 6.0, "sinks": torch.linspace(-2, 6, 4)}
        for window in (keep // 3, keep + 1):
            check(plans, keys, values, n, shown, window=window, **variant)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_dtypes_and_heads(dtype):
    plans = sliding(kivi(4), 200)
    keys, values = states(plans, 900, steps=(16, 3), dtype=dtype, heads=2, batch=2)
    for heads in (2, 10):
        check(plans, keys, values, 3, dtype=dtype, heads=heads, causal=True)


def test_each_sequence_has_its_own_length():
    plans = sliding(kivi(4), 200)
    short, long = states(plans, 140, steps=(1,)), states(plans, 900, steps=(16, 1))
    both = zip(short, long, strict=True)
    both = [[torch.cat(pair) for pair in zip(a, b, strict=True)] for a, b in both]
    q = torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(0)).half()
    got = attention.attention(q, *both, None, 0.125, *plans)
    for row, (keys, values) in enumerate((short, long)):
        expected = dense_attention(q[row : row + 1], keys, values, None, 0.125, *plans)
        assert relative_error(got[row : row + 1], expected) <= TRITON_ATTENTION[torch.float16]


def test_kernels_do_not_depend_on_how_many_tokens_are_kept_or_have_room():
    plan = kivi(2)[0]
    kept = [
        layout_of(plan + text, 64)
        for text in ("/window_size=5", "/window_size=600", "/window_size=8/room=9")
    ]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("plan", ["fp", *kivi(2)])
def test_what_a_static_cache_has_not_written_is_zero(plan):
    text = f"{plan}/window_size=299/room=300"
    for tokens in (1, 130, 300):
        x = keys_like(1, 2, tokens, 64, torch.float16)
        # All 300 tokens count, as in a step of one token.
        state = poison(torch.ops.kvpass.pack(x, text), text, 1)
        with poisoned():
            decoded = unpack.unpack(state, 300, text, torch.float16)
        assert torch.equal(decoded, torch.ops.kvpass.unpack(state, 300, text, torch.float16))
        assert not decoded[:, :, tokens:].any()


def test_a_prefill_is_declined():
    plans = sliding(kivi(2), 200)
    q = torch.randn(1, 1, 17, 64).half()
    assert unsupported_reason(q, *states(plans, 100), None, 0.125, *plans) == (
        "17 new tokens are a prefill; a ring has room for 16"
    )
