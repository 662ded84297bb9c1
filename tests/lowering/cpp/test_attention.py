"""Generated C++ attention against dense attention in float64, with poisoned memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpass.bench.contenders import decoded_rows
from lowering.cpp import attention as cpp_attention
from lowering.cpp.attention import (
    attention,
    attention_partial,
    row_size,
    unsupported_reason,
)
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates import kernel_reference
from tests.triton_templates.kernel_reference import (
    dense_attention,
    kivi,
    relative_error,
    spoil,
)

states = partial(kernel_reference.states, heads=2, batch=2, dtype=torch.float32)


def check(plans, keys, values, q, mask=None, **variant):
    arguments = (q, keys, values, mask, q.shape[3] ** -0.5, *plans)
    assert unsupported_reason(*arguments, **variant) is None
    got = attention(*arguments, **variant)
    assert got.dtype == q.dtype
    error = relative_error(got, dense_attention(*arguments, **variant))
    assert error <= CPP_ATTENTION[q.dtype], error


def query(heads, n, dim, dtype=torch.float32, batch=2):
    """With the strides that a model's transposed projection has."""
    g = torch.Generator().manual_seed(99)
    return torch.randn(batch, n, heads, dim, generator=g).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp")], ids=str)
def test_every_kind_of_length(plans, lanes):
    for tokens in (1, 100, 127, 128, 129, 257, 700):
        check(plans, *states(plans, tokens), query(8, 1, 64))
    for steps in ((1,), (16,), (16, 16, 1)):
        prompt = 200 if plans[0] == "fp" else 255
        check(plans, *states(plans, prompt, steps=steps), query(8, 1, 64))


CODECS = [
    ("int8.channel64/window=16,pack_every=64", "int2.token64/window=0,pack_every=1"),
    ("int2.channel48/window=32,pack_every=48", "int8.token32/window=8,pack_every=16"),
    ("int4.token32/window=40,pack_every=1", "int4.token64/window=8,pack_every=4"),
    ("int8.token64/window=5,pack_every=3", "fp"),
    ("fp", "int2.token32/window=64,pack_every=8"),
    ("int2.token32.fp8.clip0.92/window=32,pack_every=1", "int1.token64/window=32,pack_every=1"),
    (
        "int1.channel32.fp8/window=0,pack_every=64",
        "int1.5.token32.ternary_in_2bit.fp8/window=32,pack_every=1",
    ),
    ("int3.channel24/window=0,pack_every=48", "int3.token64.fp8/window=32,pack_every=1"),
    ("int3.token32.fp8/window=32,pack_every=1", "int2.token32/window=16,pack_every=1"),
    ("int1.5.token32.fp8/window=32,pack_every=1", "int1.5.token64/window=32,pack_every=1"),
    ("int1.5.channel24/window=0,pack_every=48", "int1.5.token16/window=0,pack_every=1"),
    (
        "int2.token32.half_split.fp8/window=32,pack_every=1",
        "int4.token16.half_split/window=16,pack_every=1",
    ),
    (
        "int3.channel24.pack11/window=0,pack_every=48",
        "int3.token16.fp8.pack11/window=32,pack_every=1",
    ),
]


@pytest.mark.parametrize("plans", CODECS, ids=str)
def test_codecs(plans):
    for tokens in (30, 300):
        check(plans, *states(plans, tokens), query(8, 1, 64))


@pytest.mark.parametrize("plans", [CODECS[i] for i in (5, 8)], ids=str)
def test_codecs_on_other_cpus(plans, lanes):
    for tokens in (30, 300):
        check(plans, *states(plans, tokens), query(8, 1, 64))


@pytest.mark.parametrize(
    ("dims", "group", "bits"),
    [
        ((16, 16), 16, 3),
        ((80, 80), 40, 2),
        ((80, 80), 40, 3),
        ((96, 96), 32, 4),
        ((112, 64), 16, 2),
        ((128, 128), 32, 3),
        ((192, 256), 64, 2),
        ((192, 256), 64, 4),
    ],
    ids=str,
)
def test_head_dims(dims, group, bits):
    plans = kivi(bits)[0], kivi(bits, group)[1]
    check(plans, *states(plans, 300, dim=dims), query(8, 1, dims[0]))


# Codes are multiplied as integers: of one token or of several in a vector, of one group or of many.
INTEGERS = [
    (kivi(4), 64, 8),
    (kivi(2), 64, 4),
    (("int2.token64/window=8,pack_every=1", "int1.token64/window=5,pack_every=1"), 64, 8),
    (("int4.token32/window=40,pack_every=1", "int8.token64/window=8,pack_every=4"), 128, 2),
    # Two groups in what would be two vectors with one weight, and three of them.
    (("int4.token16/window=40,pack_every=1", "int4.token16/window=8,pack_every=4"), 128, 8),
    ((kivi(4)[0], "int4.token64/window=8,pack_every=1"), 192, 8),
    (
        ("int8.channel64/window=16,pack_every=64", "int2.token32.half_split/window=3,pack_every=1"),
        128,
        8,
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    plans = "fp", "fp"
    check(plans, *states(plans, 300, dim=(80, 80), dtype=dtype), query(8, 1, 80, dtype))
    plans, dim, heads = INTEGERS[0]
    check(plans, *states(plans, 300, dim=dim, dtype=dtype), query(heads, 1, dim, dtype))


@pytest.mark.parametrize(("plans", "dim", "heads"), INTEGERS, ids=str)
def test_integers(plans, dim, heads):
    # Of fp16 models, whose own rounding is the smaller one.
    dtype = torch.float16
    for tokens, n in ((30, 1), (171, 1), (300, 1), (300, 7)):
        check(plans, *states(plans, tokens, dim=dim, dtype=dtype), query(heads, n, dim, dtype))


@pytest.mark.parametrize(("tiles", "most", "most_of_whole_heads"), [(0, 32, 32), (1, 12, 16)])
def test_only_many_query_rows_are_multiplied_as_matrices(
    monkeypatch, tiles: int, most: int, most_of_whole_heads: int
) -> None:
    """Codes that are multiplied as they lie are read again for every few rows; decoding them, and
    multiplying floats, takes longer up to more rows where they are multiplied as integers."""

    def turns(rows: int, plans: tuple[str, str], dtype: torch.dtype) -> bool:
        return row_size.__wrapped__(rows, *plans, 64, 64, dtype) == 4

    monkeypatch.setattr(cpp_attention, "native_tiles", lambda: tiles)
    whole = ("int2.token64/window=8,pack_every=1",) * 2
    for count, plans, dtype in (
        (8, kivi(2), torch.float32),
        (most, kivi(2), torch.bfloat16),
        (most_of_whole_heads, whole, torch.bfloat16),
        (32, kivi(2), torch.float16),
    ):
        assert turns(count, plans, dtype)
        assert not turns(count + 1, plans, dtype)
    assert not turns(9, ("fp", "fp"), torch.bfloat16)
    assert not turns(9, (kivi(2)[0], "int1.5.token32/window=8,pack_every=1"), torch.bfloat16)
    decoded = "int2.token128/window=8,pack_every=1"
    assert not turns(5, (kivi(2)[0], decoded), torch.bfloat16)


@pytest.mark.parametrize(("plans", "dim", "heads"), INTEGERS[1:3], ids=str)
def test_integers_on_other_cpus(plans, dim, heads, lanes):
    dtype = torch.float16
    check(plans, *states(plans, 300, dim=dim, dtype=dtype), query(heads, 1, dim, dtype))


# Vectors of words have one token, two or four of them; keys have a group of channels, or several.
TILES = [
    (kivi(4), 128, 8, torch.float32),
    (kivi(2), 64, 4, torch.float32),
    (
        ("int4.token32/window=40,pack_every=1", "int8.token64/window=8,pack_every=4"),
        128,
        2,
        torch.float16,
    ),
    (("int2.token64/window=8,pack_every=1", kivi(2)[1]), 128, 8, torch.bfloat16),
]


@pytest.mark.parametrize(("plans", "dim", "heads", "dtype"), TILES, ids=str)
def test_tiles(plans, dim, heads, dtype, tiles):
    for tokens in (30, 171, 300):
        check(plans, *states(plans, tokens, dim=dim, dtype=dtype), query(heads, 1, dim, dtype))


def far_apart(plans, dim, dtype=torch.float32, seed=0):
    """Packed keys with a channel, and values with tokens, that are much larger than the others."""
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(2, 2, 300, dim, generator=g).to(dtype) for _ in plans]
    tokens[0][..., 3] *= 30
    tokens[1][:, :, 40::100] *= 300
    return [torch.ops.kvpass.pack(x, plan) for x, plan in zip(tokens, plans, strict=True)]


def as_near_as_a_plain_cache(plans, packed, q):
    """As near to float64 as a plain cache of the query's type is, read by SDPA."""
    arguments = (q, *packed, None, q.shape[3] ** -0.5, *plans)
    wanted = dense_attention(*arguments)
    plain = [torch.cat(x).to(q.dtype) for x in zip(*decoded_rows(*packed, *plans), strict=True)]
    peer = scaled_dot_product_attention(q, *plain, enable_gqa=True)
    assert relative_error(attention(*arguments), wanted) <= relative_error(peer, wanted)


def test_tiles_of_numbers_that_differ_by_far(tiles):
    """Digits are steps of the largest number of a row: in float32 they lose no more than a sum of
    numbers in float32 does, whose largest one it is."""
    check(kivi(4), *far_apart(kivi(4), 64), query(8, 1, 64))


# Channels and tokens that fill tiles, and some that do not.
MATRICES = [
    (kivi(4), (128, 128)),
    (("int8.token40/window=5,pack_every=3", "int3.token16.fp8/window=32,pack_every=1"), (80, 48)),
]


@pytest.mark.parametrize(("plans", "dims"), MATRICES, ids=str)
def test_matrices_in_tiles(plans, dims, tiles):
    """Of a model in bfloat16, many query rows are."""
    dtype = torch.bfloat16
    variant = {"sinks": torch.linspace(-3, 5, 8), "causal": True, "window": 150, "softcap": 8.0}
    for tokens, n in ((30, 4), (300, 7), (300, 16)):
        keys, values = states(plans, tokens, steps=(n,), dim=dims, dtype=dtype)
        q = query(8, n, dims[0], dtype)
        hidden = torch.rand(2, 1, n, tokens + n, generator=torch.Generator().manual_seed(n)) > 0.2
        check(plans, keys, values, q, causal=True)
        check(plans, keys, values, q, hidden, **variant)


def test_matrices_in_tiles_of_numbers_that_differ_by_far(loops):
    """What is decoded is rounded as it is in a plain cache of the model's type, and no more."""
    dtype = torch.bfloat16
    as_near_as_a_plain_cache(kivi(4), far_apart(kivi(4), 64, dtype), query(8, 16, 64, dtype))


@pytest.mark.parametrize("spoiled", ["keys", "values", "query"])
def test_what_is_no_number_stays_none(spoiled, tiles):
    """Digits have no such number."""
    plans = kivi(4)
    keys, values = states(plans, 300)
    q = query(8, 1, 64)
    nothing = torch.full((), torch.nan)
    both = nothing.half().repeat(2).view(torch.int32)
    wrong = torch.zeros(2, 8, 1, 64, dtype=torch.bool)
    if spoiled == "keys":
        keys[1][0, 0, 1, 7] = both
        wrong[0, :4] = True
    elif spoiled == "values":
        values[1][0, 0, 1, 40] = both
        wrong[0, :4, :, 32:] = True
    else:
        q[0, 1, 0, 5] = nothing
        wrong[0, 1] = True
    got = attention(q, keys, values, None, 0.125, *plans)
    assert torch.equal(got.isnan(), wrong)


@pytest.mark.parametrize("seed", range(4))
def test_integers_of_numbers_that_differ_by_far(seed):
    plans, dim, heads = INTEGERS[0]
    packed = far_apart(plans, dim, torch.float16, seed)
    as_near_as_a_plain_cache(plans, packed, query(heads, 1, dim, torch.float16))


@pytest.mark.parametrize(
    "plans",
    [
        ("int1.5.token20.fp8/window=32,pack_every=1", "int1.5.token40/window=32,pack_every=1"),
        ("int3.channel24/window=0,pack_every=48", "int3.token16.fp8/window=32,pack_every=1"),
        ("int8.token40/window=5,pack_every=3", "fp"),
        ("fp", "int4.token80/window=64,pack_every=8"),
    ],
    ids=str,
)
def test_codecs_with_many_query_rows(plans):
    for tokens in (30, 300):
        check(plans, *states(plans, tokens, dim=80), query(6, 3, 80))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n"),
    [(2, 2, 1), (4, 2, 1), (6, 2, 1), (7, 1, 1), (2, 2, 3), (9, 1, 1), (8, 2, 16)],
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


VARIANTS = {
    **kernel_reference.VARIANTS,
    "sinks-fp16": {"sinks": torch.linspace(-3, 5, 8).half()},
    "all": {"sinks": torch.linspace(-3, 5, 8), "causal": True, "window": 150, "softcap": 8.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, lanes):
    """Alone and with a mask, for as many new tokens as there are of the last prompt or step."""
    for plans in (kivi(2), ("fp", "fp")):
        for prompt, n in ((16, 16), (300, 1), (300, 5), (700, 16)):
            keys, values = states(plans, prompt, steps=(n,))
            hidden = torch.rand(2, 1, n, prompt + n, generator=torch.Generator().manual_seed(n))
            for mask in (None, hidden > 0.2):
                check(plans, keys, values, query(8, n, 64), mask, **VARIANTS[name])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (8, 2)])
def test_variants_of_query_rows(heads, kv_heads):
    keys, values = states(kivi(2), 300, heads=kv_heads, steps=(3,))
    variant = {"sinks": torch.randn(heads), "causal": True, "window": 130, "softcap": 8.0}
    check(kivi(2), keys, values, query(heads, 3, 64), **variant)


def test_many_new_tokens():
    """As many as a model without a cache of its own has: every query row has its own bounds."""
    plans = kivi(4)
    keys, values = states(plans, 300)
    for variant in (VARIANTS["causal"], VARIANTS["causal-window"]):
        check(plans, keys, values, query(8, 300, 64), **variant)


@pytest.mark.parametrize("plans", [kivi(2), ("fp", "fp")], ids=str)
def test_tokens_outside_a_window_are_not_read(plans):
    keys, values = states(plans, 700, steps=(3,))
    first = 703 - 3 + 1 - 300
    for state, plan in zip((keys, values), plans, strict=True):
        spoil(state, plan, first // 32 * 32)
    q = query(8, 3, 64)
    scale, variant = q.shape[3] ** -0.5, {"causal": True, "window": 300}
    got = attention(q, keys, values, None, scale, *plans, **variant)
    clean = states(plans, 700, steps=(3,))
    expected = dense_attention(q, *clean, None, scale, *plans, **variant)
    assert relative_error(got, expected) <= CPP_ATTENTION[q.dtype]


def test_tokens_that_a_mask_hides_from_all_are_not_read():
    """Whole blocks of them, as left padding does."""
    plans = kivi(2)
    keys, values = states(plans, LENGTH)
    for state, plan in zip((keys, values), plans, strict=True):
        spoil(state, plan, 128)
    mask = (torch.arange(LENGTH) >= 130).expand(1, 1, 1, -1)
    for hidden in (mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))):
        assert attention(query(8, 1, 64), keys, values, hidden, 0.1, *plans).isfinite().all()


def test_a_static_cache_has_a_mask_for_its_whole_buffer():
    plans = tuple(f"{plan}/window_size=639/room=640" for plan in kivi(4))
    mask = torch.zeros(2, 1, 3, 640, dtype=torch.bool)
    mask[..., 20:300] = True
    check(plans, *states(plans, LENGTH), query(8, 3, 64), mask, causal=True)


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


def with_sinks(plans, count):
    return tuple(plan.replace("/window", f"/sinks={count},window") for plan in plans)


SINKS = [
    with_sinks(kivi(2), 5),
    with_sinks(("int2.token32.fp8.clip0.92/window=32,pack_every=1",) * 2, 4),
    ("fp", with_sinks(kivi(4), 150)[1]),
]


@pytest.mark.parametrize("plans", SINKS, ids=str)
def test_sinks_that_stay_exact(plans):
    for tokens in (1, 4, 5, 6, 133, 134, 300, 700):
        check(plans, *states(plans, tokens), query(8, 1, 64))
    for prompt, *steps in ((3, 1, 1, 1), (239, 16), (4, 200, 16, 3)):
        keys, values = states(plans, prompt, steps=steps)
        n, total = steps[-1], prompt + sum(steps)
        hidden = torch.rand(2, 1, n, total, generator=torch.Generator().manual_seed(n)) > 0.2
        for variant in ({}, {"causal": True}, {"causal": True, "window": 130}, {"window": 3}):
            for mask in (None, hidden):
                check(plans, keys, values, query(8, n, 64), mask, **variant)


def test_long_contexts_with_sinks_are_split_between_threads():
    plans, threads = SINKS[0], torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        check(plans, *states(plans, 5000, heads=1, batch=1), query(4, 1, 64, batch=1))
    finally:
        torch.set_num_threads(threads)


def test_what_is_declined():
    plans = kivi(2)
    keys, values = states(plans, 40)
    q = query(8, 1, 64)
    by_channel = states((plans[0], plans[0]), 40)

    def reason(q=q, keys=keys, values=values, mask=None, plans=plans):
        return unsupported_reason(q, keys, values, mask, 1.0, *plans)

    assert reason() is None
    assert reason(q=q.bfloat16()) == (
        "the query is torch.bfloat16, keys are torch.float32, values torch.float32"
    )
    assert reason(mask=torch.zeros(1, dtype=torch.int64)) == "the mask is torch.int64"
    assert reason(keys=[t.transpose(0, 1) for t in keys]) == "codes is not contiguous"
    assert reason(values=by_channel[1], plans=(plans[0],) * 2).endswith("groups along tokens")
    other = (f"{plans[0]}/window_size=100", f"{plans[1]}/window_size=101")
    assert reason(plans=other) == (
        f"keys {other[0]} and values {other[1]} do not keep the same tokens"
    )
    apart = (with_sinks(plans, 5)[0], plans[1])
    assert reason(keys=states(apart, 40)[0], plans=apart) == (
        f"keys {apart[0]} and values {apart[1]} do not have the same sinks"
    )
    small = (plans[0], "int2.token2/window=0,pack_every=1")
    assert reason(values=states(small, 40)[1], plans=small).startswith(
        "groups of 2 channels are too small for"
    )


@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp")], ids=str)
def test_a_score_that_is_no_number_shows(plans):
    keys, values = states(plans, 300)
    # Token 20, or in the exact window 273.
    slot = (0, 20) if plans[0] == "fp" else (2, 273 % 143)
    keys[slot[0]][1, :, slot[1], 3] = torch.nan
    arguments = (query(8, 1, 64)[1:], *([t[1:] for t in x] for x in (keys, values)))
    mask = torch.zeros(1, 1, 1, 300)
    out = attention(*arguments, mask, 0.125, *plans)
    assert out.isnan().all()
    other = attention(query(8, 1, 64), keys, values, mask, 0.125, *plans)[0]
    assert not other.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
@pytest.mark.parametrize("n", [1, 40], ids=["few rows", "many"])
def test_a_query_that_is_no_number_shows(n, number, dtype):
    """Also where codes are multiplied as integers, and where rows are those of a matrix."""
    plans, dim, heads = INTEGERS[0]
    q = query(heads, n, dim, dtype)
    q[0, 1, n // 2, 3] = number
    arguments = (q, *states(plans, 300, dim=dim, dtype=dtype), None, 0.125, *plans)
    for found in (attention(*arguments), attention_partial(*arguments)):
        assert found[0, 1, n // 2].isnan().all()
        assert found.isnan().sum() == found.shape[-1]
