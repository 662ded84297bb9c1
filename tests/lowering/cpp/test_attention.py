"""Generated C++ attention against dense attention in float64, with poisoned memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lowering.cpp.attention import attention, supports
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates import kernel_reference
from tests.triton_templates.kernel_reference import (
    dense_attention,
    kivi,
    relative_error,
)

states = partial(kernel_reference.states, heads=2, batch=2, dtype=torch.float32)


def check(plans, keys, values, q, mask=None):
    arguments = (q, keys, values, mask, q.shape[3] ** -0.5, *plans)
    assert supports(*arguments) is None
    got = attention(*arguments)
    assert got.dtype == q.dtype
    error = relative_error(got, dense_attention(*arguments))
    assert error <= CPP_ATTENTION[q.dtype], error


def query(heads, n, dim, dtype=torch.float32, batch=2):
    """With the strides that a model's transposed projection has."""
    g = torch.Generator().manual_seed(99)
    return torch.randn(batch, n, heads, dim, generator=g).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("plans", [kivi(2), kivi(4), ("fp", "fp")], ids=str)
def test_every_kind_of_length(plans, lanes):
    for tokens in (1, 100, 127, 128, 129, 257, 700):
        check(plans, *states(plans, tokens), query(8, 1, 64))
    for steps in ((1,), (16,), (16, 16, 1)):
        prompt = 200 if plans[0] == "fp" else 255
        check(plans, *states(plans, prompt, steps=steps), query(8, 1, 64))


@pytest.mark.parametrize(
    "plans",
    [
        ("int8.channel64/window=16,flush=64", "int2.token64/window=0,flush=1"),
        ("int2.channel48/window=32,flush=48", "int8.token32/window=8,flush=16"),
        ("int4.token32/window=40,flush=1", "int4.token64/window=8,flush=4"),
        ("int8.token64/window=5,flush=3", "fp"),
        ("fp", "int2.token32/window=64,flush=8"),
    ],
    ids=str,
)
def test_codecs(plans, lanes):
    for tokens in (30, 300):
        check(plans, *states(plans, tokens), query(8, 1, 64))


@pytest.mark.parametrize(
    ("dims", "group"),
    [
        ((16, 16), 16),
        ((80, 80), 40),
        ((96, 96), 32),
        ((112, 64), 16),
        ((128, 128), 32),
        ((192, 256), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [2, 4])
def test_head_dims(dims, group, bits):
    plans = kivi(bits)[0], kivi(bits, group)[1]
    check(plans, *states(plans, 300, dim=dims), query(8, 1, dims[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp")], ids=str)
def test_dtypes(plans, dtype, lanes):
    check(plans, *states(plans, 300, dim=(80, 80) if plans[0] == "fp" else (64, 64), dtype=dtype),
          query(8, 1, 80 if plans[0] == "fp" else 64, dtype))  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n"), [(2, 2, 1), (4, 2, 1), (6, 2, 1), (7, 1, 1), (2, 2, 3), (8, 2, 16)]
)
def test_query_rows(heads, kv_heads, n):
    plans = kivi(2)
    check(plans, *states(plans, 300, heads=kv_heads), query(heads, n, 64))


LENGTH = 300


def padding():
    return torch.arange(LENGTH).expand(2, 1, 1, LENGTH) >= torch.tensor([7, 140]).view(2, 1, 1, 1)


MASKS = {
    "padding": padding,
    "causal": lambda: torch.ones(3, LENGTH, dtype=torch.bool).tril(LENGTH - 3)[None, None],
    "one-head": lambda: torch.rand(1, 8, 1, LENGTH) > 0.5,
    "hidden-row": lambda: (torch.arange(3) != 1).view(1, 1, 3, 1).expand(2, 1, 3, LENGTH),
    "additive": lambda: torch.randn(2, 8, 3, LENGTH),
    "additive-bf16": lambda: torch.randn(1, 1, 3, LENGTH).bfloat16(),
    "additive-fp16": lambda: torch.randn(1, 1, 3, LENGTH).half(),
    "transposed": lambda: torch.randn(2, 8, LENGTH, 3).transpose(2, 3),
    "lowest": lambda: torch.full((1, 1, 3, LENGTH), torch.finfo(torch.float32).min),
    "infinite": lambda: torch.full((1, 1, 3, LENGTH), float("-inf")).triu(LENGTH - 2),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    torch.manual_seed(0)
    plans = kivi(4)
    made = MASKS[mask]()
    n = made.shape[2] if made.shape[2] > 1 else 3
    check(plans, *states(plans, LENGTH), query(8, n, 64), made)


def test_long_contexts_are_split_between_threads():
    plans, threads = kivi(2), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        check(plans, *states(plans, 5000, heads=1, batch=1), query(4, 1, 64, batch=1))
    finally:
        torch.set_num_threads(threads)


def test_an_empty_cache_gives_zeros():
    plans = kivi(2)
    keys, values = states(plans, 1)
    for state in (keys, values):
        state[-1].zero_()
    out = attention(query(8, 1, 64), keys, values, None, 1.0, *plans)
    assert torch.equal(out, torch.zeros_like(out))


def test_what_is_declined():
    plans = kivi(2)
    keys, values = states(plans, 40)
    q = query(8, 1, 64)
    by_channel = states((plans[0], plans[0]), 40)

    def reason(q=q, keys=keys, values=values, mask=None, plans=plans):
        return supports(q, keys, values, mask, 1.0, *plans)

    assert reason() is None
    assert reason(q=q.bfloat16()) == (
        "the query is torch.bfloat16, keys are torch.float32, values torch.float32"
    )
    assert reason(mask=torch.zeros(1, dtype=torch.int64)) == "the mask is torch.int64"
    assert reason(keys=[t.transpose(0, 1) for t in keys]) == "codes is not contiguous"
    assert reason(values=by_channel[1], plans=(plans[0],) * 2).endswith("groups along tokens")
    small = (plans[0], "int2.token2/window=0,flush=1")
    assert reason(values=states(small, 40)[1], plans=small).startswith(
        "groups of 2 channels are too small for"
    )
