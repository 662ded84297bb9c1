"""Generated C++ over pages of many requests: against the references, with poisoned memory."""

from __future__ import annotations

import pytest
import torch

from kvpass.ops.append_pages import append_pages as append_reference
from kvpass.ops.attention_pages import attention_pages as attention_reference
from lowering.cpp import append_pages, attention_pages
from tests.pool import LENGTHS, Pool, raw
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import kivi, relative_error


def attended(pool: Pool, step, pages, heads: int, softcap: float, sinks) -> float:
    """The relative error of the queries of a step."""
    g = torch.Generator().manual_seed(9)
    count = pages[0][-1].shape[2]
    q = torch.randn(1, count, heads, pool.dim, generator=g).to(pool.dtype).transpose(1, 2)
    arguments = (step, pool.dim**-0.5, *pool.plans, softcap, pool.window, sinks)
    out = torch.full((count, heads, pool.dim), torch.nan, dtype=pool.dtype)
    assert attention_pages.unsupported_reason(out, q, *pages, *arguments) is None
    other = torch.float32 if pool.dtype == torch.bfloat16 else torch.bfloat16
    declined = attention_pages.unsupported_reason(out, q.to(other), *pages, *arguments)
    assert declined == f"queries are {other}, keys {pool.dtype}"
    attention_pages.attention_pages(out, q, *pages, *arguments)
    wide = [[*stored, exact.double(), new.double()] for *stored, exact, new in pages]
    expected = torch.empty_like(out, dtype=torch.float64)
    attention_reference(expected, q.double(), *wide, *arguments)
    return relative_error(out, expected)


def check(pool: Pool, heads: int = 8, softcap: float = 0.0, sinks=None) -> None:
    """Prompts, then steps of one and of several tokens."""
    for new in (LENGTHS, (1,) * 8, (16, 1, 3, 1, 2, 1, 1, 16)):
        step, pages = pool.step(new)
        for side, plan in zip(pages, pool.plans, strict=True):
            twin = [t.clone() for t in side[:-2]]
            append_reference([*twin, *side[-2:]], step, plan)
            assert append_pages.unsupported_reason(side, step, plan) is None
            append_pages.append_pages(side, step, plan)
            for written, expected in zip(side, twin, strict=False):
                assert torch.equal(raw(written), raw(expected))
        if new != LENGTHS:
            error = attended(pool, step, pages, heads, softcap, sinks)
            assert error <= CPP_ATTENTION[pool.dtype], (error, new)
        pool.keep(step, pages)


SINKS = "sinks=5,window=12,pack_every=1"
PLANS = [
    kivi(2),
    (f"int2.token32.fp8.clip0.92/{SINKS}", f"int1.5.token32.fp8/{SINKS}"),
    ("fp", "fp"),
    ("fp", kivi(4)[1]),
]


@pytest.mark.parametrize("plans", PLANS, ids=str)
def test_each_request_attends_to_its_own_pages(plans):
    check(Pool(plans))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_as_integers(dtype):
    check(Pool((f"int4.token64/{SINKS}", f"int2.token32/{SINKS}"), dtype=dtype), heads=2)


def test_many_query_heads_and_small_pages():
    check(Pool(kivi(4), page=32, pages=128), heads=16, softcap=3.0)


def test_matrices_in_tiles(loops):
    """Of many query heads, in bfloat16."""
    check(Pool(kivi(4), dtype=torch.bfloat16), heads=32)


def test_groups_of_several_heads():
    check(Pool((f"int2.token128.fp8/{SINKS}", f"int2.token128.fp8/{SINKS}")), heads=4)


WINDOWS = [
    (kivi(2), 200),
    (kivi(2), 30),
    (("int2.token32.clip0.9/window=12,pack_every=1", "int1.5.token64/window=9,pack_every=2"), 77),
    (("fp", kivi(4)[1]), 150),
    (("fp", "fp"), 1),
]


@pytest.mark.parametrize(("plans", "window"), WINDOWS, ids=str)
def test_no_query_looks_before_its_window(plans, window):
    """Its pages are poisoned by then; with scores of attention sinks."""
    sinks = torch.linspace(-2, 3, 8, dtype=torch.bfloat16)
    check(Pool(plans, window=window, page=32, pages=128), sinks=sinks)
