"""The attention kernels in Triton's interpreter against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpass.ops.attention_partial import attention_partial as partial_reference
from lowering.triton.attention import attend, attention, attention_partial, unsupported_reason
from lowering.triton.heuristics import attention_candidates, attention_sizes
from lowering.triton.launch import record_launches
from lowering.triton.layouts import layout_of
from tests.tolerances import TRITON_ATTENTION, TRITON_EXACT_FP32
from tests.triton_templates import kernel_reference
from tests.triton_templates.kernel_reference import (
    dense_attention,
    keys_like,
    kivi,
    poison,
    relative_error,
    spoil,
    states,
)

pytestmark = pytest.mark.interpreter


def check(plans, keys, values, q, mask=None, tolerance=None, **variant):
    scale = q.shape[3] ** -0.5
    arguments = (q, keys, values, mask, scale, *plans)
    assert unsupported_reason(*arguments, **variant) is None
    got = attention(*arguments, **variant)
    assert got.dtype == q.dtype
    assert got.is_contiguous()
    error = relative_error(got, dense_attention(*arguments, **variant))
    assert error <= (tolerance or TRITON_ATTENTION[q.dtype]), error


def query(batch, heads, n, dim, dtype=torch.float16, seed=99):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, n, dim, generator=g).to(dtype)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [1, 100, 127, 128, 129, 257, 2100])
def test_kivi_at_every_kind_of_length(bits, tokens):
    plans = kivi(bits)
    check(plans, *states(plans, tokens), query(1, 4, 1, 64))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("steps", [(1,), (1, 1), (16,), (16, 16, 1)])
def test_kivi_around_a_flush(bits, steps):
    plans = kivi(bits)
    check(plans, *states(plans, 255, dim=128, steps=steps), query(1, 4, 1, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 300])
def test_identity(dtype, tokens):
    tolerance = TRITON_EXACT_FP32 if dtype == torch.float32 else None
    keys, values = states(("fp", "fp"), tokens, dtype=dtype)
    check(("fp", "fp"), keys, values, query(1, 2, 1, 64, dtype), tolerance=tolerance)


@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp")], ids=str)
def test_partial_attention_says_what_it_weighs(plans):
    """Of some queries nothing; with scores of attention sinks."""
    keys, values = states(plans, 300)
    q, mask = query(1, 4, 3, 64), torch.ones(1, 1, 3, 300, dtype=torch.bool)
    mask[:, :, 1] = False
    for sinks in (None, torch.linspace(-1, 2, 4)):
        arguments = (keys, values, mask, 64**-0.5, *plans, sinks)
        found, wanted = attention_partial(q, *arguments), partial_reference(q, *arguments)
        assert (found.dtype, found.shape) == (torch.float32, (1, 4, 3, 65))
        assert torch.equal(found.isinf(), wanted.isinf())
        assert bool(found.isinf().any()) == (sinks is None)
        seen = [x.masked_fill(x.isinf(), 0) for x in (found, wanted)]
        assert relative_error(*seen) <= TRITON_ATTENTION[q.dtype]


@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp")], ids=str)
def test_a_query_that_is_no_number_shows(plans):
    q = query(1, 4, 1, 64)
    q[0, 1, 0, 3] = torch.nan
    arguments = (q, *states(plans, 300), None, 0.125, *plans)
    for found in (attention(*arguments), attention_partial(*arguments)):
        assert found[0, 1].isnan().all()
        assert not found[0, [0, 2, 3]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kivi_in_other_dtypes(dtype):
    plans = kivi(2)
    keys, values = states(plans, 300, dim=128, dtype=dtype)
    check(plans, keys, values, query(1, 4, 1, 128, dtype))


@pytest.mark.parametrize(
    "plans",
    [
        ("int4.channel64/window=16,pack_every=64", "int2.token64/window=0,pack_every=1"),
        ("int8.channel128/window=32,pack_every=128", "int4.token64/window=8,pack_every=16"),
        ("int2.channel128/window=0,pack_every=128", "int8.token32/window=64,pack_every=8"),
        ("int4.token32/window=40,pack_every=1", "int2.token32/window=8,pack_every=4"),
        ("int2.token16/window=0,pack_every=1", "int4.token16/window=0,pack_every=1"),
        ("int8.token16/window=5,pack_every=3", "int8.token16/window=7,pack_every=2"),
        ("fp", "int4.token32/window=128,pack_every=1"),
        ("int2.channel16/window=128,pack_every=16", "fp"),
    ],
    ids=str,
)
def test_pairs_of_formats(plans):
    check(plans, *states(plans, 333, steps=(1, 5)), query(1, 4, 1, 64))


@pytest.mark.parametrize("tokens", [7, 333])
def test_windows_that_grow(tokens):
    plans = (
        "int2.channel32/sinks=3,window=0,pack_every=32,fraction=0.2",
        "int2.token32/sinks=3,window=9,pack_every=1,pivotal=0.3",
    )
    check(plans, *states(plans, tokens), query(1, 4, 1, 64))


# Codecs of keys and of values, their head dimensions, and query heads on the one KV head.
FORMATS = [
    ("int2.channel64", "int8.token64", 64, 64, 8),
    ("int8.token64", "int2.token64", 64, 64, 1),
    ("int2.token64", "int4.token32", 64, 64, 32),
    ("int4.channel32", "int2.token16", 80, 80, 4),
    ("int8.channel64", "int4.token16", 80, 80, 1),
    ("int2.channel32", "int2.token32", 96, 96, 2),
    ("int2.channel128", "int4.token16", 112, 112, 4),
    ("int8.channel32", "int8.token112", 112, 112, 3),
    ("int4.channel128", "fp", 128, 128, 5),
    ("fp", "int2.token128", 128, 128, 4),
    ("int4.token128", "int4.token64", 128, 128, 16),
    ("int2.token64.half_split.fp8", "int2.token64.fp8", 128, 128, 4),
    ("int4.token32.half_split", "int3.token32.half_split", 128, 128, 3),
    ("int2.channel32", "int2.token32", 192, 192, 2),
    ("int4.channel64", "int8.token32", 192, 128, 1),
    ("int2.channel128", "int4.token256", 256, 256, 4),
    ("int8.token32", "int2.token32", 256, 256, 2),
    ("int4.channel32", "int4.token32", 128, 64, 4),
    ("fp", "int8.token128", 64, 256, 1),
    ("int2.token64.fp8", "int1.5.token128.ternary_in_2bit.fp8", 128, 128, 4),
    ("int2.token128.fp8", "int1.5.token128.fp8", 128, 128, 4),
    ("int1.5.token64", "int1.5.token160", 64, 160, 1),
    ("fp", "int1.5.token32", 32, 32, 4),
    ("int1.5.channel32", "int1.5.token64.fp8", 128, 128, 4),
    ("int1.5.channel16.fp8", "int1.5.token16", 64, 80, 2),
    ("int3.channel32", "int3.token32", 128, 128, 4),
    ("int3.token64", "int3.token16", 64, 96, 12),
    ("int3.channel32.pack11", "int3.token32.pack11", 128, 128, 4),
    ("int3.channel16.pack11", "int3.token64.fp8.pack11", 80, 64, 3),
    ("int1.channel64", "int1.token128", 128, 128, 8),
    ("int4.channel32.fp8", "int4.token16.fp8", 80, 80, 2),
]


@pytest.mark.parametrize("case", FORMATS, ids=lambda case: "-".join(map(str, case)))
def test_formats_and_head_dims(case):
    k, v, key_dim, value_dim, heads = case
    plans = [p if p == "fp" else f"{p}/window=16,pack_every=128" for p in (k, v)]
    keys, values = states(plans, 300, dim=(key_dim, value_dim))
    g = torch.Generator().manual_seed(heads)
    mask = torch.rand(1, heads, 1, 300, generator=g) > 0.3
    check(plans, keys, values, query(1, heads, 1, key_dim), mask)


@pytest.mark.parametrize(
    ("heads", "n"), [(1, 1), (8, 1), (3, 3), (12, 1), (4, 4), (16, 1), (17, 1), (4, 10)]
)
def test_query_rows(heads, n):
    """From one query head on a KV head to several blocks of 16 rows, with unused columns."""
    plans = kivi(2)
    causal = torch.ones(n, 200 + n, dtype=torch.bool).tril(200)[None, None]
    keys, values = states(plans, 200, steps=(n,))
    check(plans, keys, values, query(1, heads, n, 64), causal)


@pytest.mark.parametrize(
    ("plans", "heads"), [(kivi(2), 4), (kivi(4), 12), (("fp", "fp"), 4)], ids=str
)
def test_every_size_that_is_tried(plans, heads):
    """Recorded, then run, as when they are measured."""
    keys, values = states(plans, 1290)
    q = query(1, heads, 1, 64)
    arguments = (q, keys, values, None, 0.125, *plans)
    expected = dense_attention(*arguments)
    k, v = (layout_of(plan, 64) for plan in plans)
    table = attention_sizes(k, v, heads, 1, keys[0].shape[2], q)
    # Warps and stages mean nothing to the interpreter.
    tried = {replace(s, warps=1, stages=2): s for s in attention_candidates(table, k, v)}
    for sizes in tried.values():
        with record_launches() as launches:
            got = attend(sizes, *arguments)
        for launch in launches:
            launch.run()
        assert relative_error(got, expected) <= TRITON_ATTENTION[q.dtype], sizes


def test_batch_and_kv_heads():
    plans = kivi(4)
    check(plans, *states(plans, 150, batch=2, heads=2), query(2, 4, 1, 64))


def test_each_sequence_has_its_own_length():
    plans = kivi(4)
    short, long = states(plans, 140), states(plans, 255)
    both = zip(short, long, strict=True)
    both = [[torch.cat(pair) for pair in zip(a, b, strict=True)] for a, b in both]
    q = query(2, 4, 1, 64)
    got = attention(q, *both, None, 0.125, *plans)
    for row, (keys, values) in enumerate((short, long)):
        expected = dense_attention(q[row : row + 1], keys, values, None, 0.125, *plans)
        assert relative_error(got[row : row + 1], expected) <= TRITON_ATTENTION[torch.float16]


def masks() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    visible = torch.rand(2, 4, 2, 180, generator=g) > 0.4
    padding = torch.ones(2, 1, 1, 180, dtype=torch.bool)
    padding[0, :, :, :150] = False
    lowest = torch.zeros(2, 1, 2, 180, dtype=torch.float16)
    lowest.masked_fill_(~padding, torch.finfo(torch.float16).min)
    hidden_row = visible.clone()
    hidden_row[1, 2, 1] = False
    return {
        "bool": visible,
        "bool-padding": padding,
        "bool-one-head": visible[:, :1],
        "bool-hidden-row": hidden_row,
        "additive": torch.randn(1, 4, 2, 180, generator=g),
        "additive-lowest": lowest,
        "additive-infinite": torch.where(visible, 0.0, float("-inf")),
        "additive-transposed": torch.randn(1, 4, 180, 2, generator=g).transpose(2, 3),
    }


@pytest.mark.parametrize("name", masks())
def test_masks(name):
    plans = kivi(4)
    keys, values = states(plans, 180, batch=2, heads=2)
    check(plans, keys, values, query(2, 4, 2, 64), masks()[name])


VARIANTS = {
    **kernel_reference.VARIANTS,
    "all": {"sinks": torch.linspace(-3, 5, 8), "causal": True, "window": 350, "softcap": 8.0},
}


# The interpreter takes seconds for each: all with one pair of formats, some with the others.
VARIED = [
    *((name, kivi(2)) for name in VARIANTS),
    *((name, ("fp", "fp")) for name in ("causal-window", "all")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plans"), VARIED, ids=str)
def test_variants(name, plans):
    """As many new tokens as the last prompt or step has. A single one, and all variants at once,
    also with a mask."""
    heads = 2 if name == "all" else 1
    g = torch.Generator().manual_seed(3)
    for prompt, n in ((16, 16), (300, 1), (430, 5)):
        keys, values = states(plans, prompt, steps=(n,), heads=heads)
        hidden = torch.rand(1, 1, n, prompt + n, generator=g) > 0.2
        for mask in (None, hidden) if n == 1 or name == "all" else (None,):
            check(plans, keys, values, query(1, 8, n, 64), mask, **VARIANTS[name])


@pytest.mark.parametrize(("heads", "kv_heads", "n"), [(2, 2, 3), (7, 1, 3), (4, 1, 10), (2, 1, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_variants_of_query_rows(heads, kv_heads, n, dtype):
    """Among them more new tokens than a step has, of which some are packed."""
    plans = kivi(2)
    keys, values = states(plans, 400, heads=kv_heads, dtype=dtype)
    variant = {"sinks": torch.linspace(-2, 2, heads), "causal": True, "window": 230}
    check(plans, keys, values, query(1, heads, n, 64, dtype), softcap=8.0, **variant)


@pytest.mark.parametrize("plans", [kivi(2), ("fp", "fp")], ids=str)
def test_tokens_outside_a_window_are_not_read(plans):
    keys, values = states(plans, 700, steps=(3,))
    clean = states(plans, 700, steps=(3,))
    for state, plan in zip((keys, values), plans, strict=True):
        spoil(state, plan, (703 - 3 + 1 - 300) // 32 * 32)
    q, variant = query(1, 4, 3, 64), {"causal": True, "window": 300}
    got = attention(q, keys, values, None, 0.125, *plans, **variant)
    expected = dense_attention(q, *clean, None, 0.125, *plans, **variant)
    assert relative_error(got, expected) <= TRITON_ATTENTION[q.dtype]


def test_a_static_cache_has_a_mask_for_its_whole_buffer():
    plans = tuple(f"{plan}/window_size=639/room=640" for plan in kivi(4))
    mask = torch.zeros(1, 1, 3, 640, dtype=torch.bool)
    mask[..., 20:300] = True
    check(plans, *states(plans, 300), query(1, 4, 3, 64), mask, causal=True)


def test_a_query_that_is_a_transposed_view():
    plans = kivi(4)
    keys, values = states(plans, 180, heads=2)
    q = query(1, 3, 4, 64).transpose(1, 2)
    check(plans, keys, values, q)


def test_large_keys_offset():
    """Keys with a constant of 300 on some channels, as models with a key bias have.

    Scores are then sums of large terms; the query must not lose bits before it meets the minimum.
    """
    plans = kivi(4)
    keys = keys_like(1, 1, 256, 64, torch.float16)
    keys[..., ::16] += 300
    state = poison(torch.ops.kvpass.pack(keys, plans[0]), plans[0])
    _, values = states(plans, 256)
    check(plans, state, values, query(1, 4, 1, 64))
