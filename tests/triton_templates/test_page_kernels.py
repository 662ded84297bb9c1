"""Pages of many requests in Triton's interpreter: against the references, with poisoned memory."""

from __future__ import annotations

import pytest
import torch

from kvpass.ops.append_pages import append_pages as append_reference
from kvpass.ops.attention_pages import attention_pages as attention_reference
from lowering.triton import append_pages, attention_pages
from tests.pool import LENGTHS, Pool, raw
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import kivi, relative_error

pytestmark = pytest.mark.interpreter

# Prompts, then steps of one and of several tokens.
PROMPTS, *STEPS = (1, 129, 300), (1, 1, 1), (4, 3, 1)


def append(pool: Pool, step, pages) -> None:
    """Packs what is due, the same bits as the reference."""
    for side, plan in zip(pages, pool.plans, strict=True):
        twin = [t.clone() for t in side[:-2]]
        append_reference([*twin, *side[-2:]], step, plan)
        assert append_pages.unsupported_reason(side, step, plan) is None
        append_pages.append_pages(side, step, plan)
        for written, expected in zip(side, twin, strict=False):
            assert torch.equal(raw(written), raw(expected))


def check(pool: Pool, heads: int = 8, softcap: float = 0.0, sinks=None, steps=STEPS) -> None:
    for new in (PROMPTS, *steps):
        step, pages = pool.step(new)
        append(pool, step, pages)
        if new != PROMPTS:
            g = torch.Generator().manual_seed(9)
            count = pages[0][-1].shape[2]
            q = torch.randn(1, count, heads, pool.dim, generator=g).to(pool.dtype).transpose(1, 2)
            arguments = (step, pool.dim**-0.5, *pool.plans, softcap, pool.window, sinks)
            out = torch.full((count, heads, pool.dim), torch.nan, dtype=pool.dtype)
            assert attention_pages.unsupported_reason(out, q, *pages, *arguments) is None
            attention_pages.attention_pages(out, q, *pages, *arguments)
            wide = [[*stored, exact.double(), new.double()] for *stored, exact, new in pages]
            expected = torch.empty_like(out, dtype=torch.float64)
            attention_reference(expected, q.double(), *wide, *arguments)
            assert relative_error(out, expected) <= TRITON_ATTENTION[pool.dtype]
        pool.keep(step, pages)


WITH_SINKS = (
    "int2.token32.fp8/sinks=5,window=12,pack_every=1",
    "int1.5.token64.fp8/sinks=5,window=20,pack_every=1",
)
CASES = [
    (kivi(2), {}),
    (kivi(4), {"dtype": torch.bfloat16, "page": 32, "pages": 160}),
    (("int2.token32.clip0.9/window=12,pack_every=1", "int1.5.token64/window=9,pack_every=2"), {}),
    (("int3.channel16/window=4,pack_every=16", "int8.token16/window=30,pack_every=3"),
     {"dim": 96}),
    (WITH_SINKS, {}),
    (("int3.channel16.pack11/window=4,pack_every=16", "int1.5.token32/window=9,pack_every=2"), {}),
    (("int4.token32.half_split/window=12,pack_every=1",
      "int3.token16.pack11/window=3,pack_every=3"), {"dim": 96}),
]  # fmt: skip


@pytest.mark.parametrize(("plans", "sizes"), CASES, ids=str)
def test_each_request_attends_to_its_own_pages(plans, sizes):
    check(Pool(plans, lengths=[0] * len(PROMPTS), **sizes))


def test_one_head_of_keys_and_soft_caps():
    pool = Pool(kivi(4), heads=1, dtype=torch.float16, lengths=[0] * len(PROMPTS))
    # With as many tokens as a step may have.
    check(pool, heads=12, softcap=5.0, steps=((16, 3, 1),))


WINDOWS = [
    (kivi(2), {"window": 200}),
    (("fp", "fp"), {"window": 30, "dtype": torch.bfloat16, "dim": 96}),
    (("int2.token32.clip0.9/window=12,pack_every=1", "int1.5.token64/window=9,pack_every=2"),
     {"window": 77, "page": 32}),
    (("int3.channel16/window=4,pack_every=16", "int8.token16/window=30,pack_every=3"),
     {"dim": 96, "window": 50}),
]  # fmt: skip


@pytest.mark.parametrize(("plans", "sizes"), WINDOWS, ids=str)
def test_no_query_looks_before_its_window(plans, sizes):
    """Its pages are poisoned by then; with scores of attention sinks."""
    sinks = torch.linspace(-2, 3, 8, dtype=torch.bfloat16)
    check(Pool(plans, lengths=[0] * len(PROMPTS), **sizes), sinks=sinks)


DECLINED = [
    (("nuq3.channel0.codebook-1.0,-0.5,-0.25,0.0,0.1,0.25,0.5,1.0/window=0,pack_every=1",
      "int2.token32/window=9,pack_every=1"), {}, "has to be decoded"),
    (("int2.channel16/sinks=5,window=12,pack_every=16",
      "int2.token32/sinks=5,window=9,pack_every=1"), {},
     "the sinks of int2.channel16/sinks=5,window=12,pack_every=16 are not whole groups"),
    (
        ("int2.token32/window=9,pack_every=1",) * 2,
        {"page": 24},
        "24 tokens do not hold whole tiles",
    ),
    (kivi(2), {"dtype": torch.float64}, "torch.float64"),
]  # fmt: skip


@pytest.mark.parametrize(("plans", "sizes", "reason"), DECLINED, ids=str)
def test_declined(plans, sizes, reason):
    step, pages = (pool := Pool(plans, **sizes)).step(LENGTHS)
    q = pages[0][-1]
    declined = attention_pages.unsupported_reason(q, q, *pages, step, 1.0, *pool.plans)
    assert reason in declined
    sides = zip(pages, pool.plans, strict=True)
    assert any(reason in (append_pages.unsupported_reason(x, step, p) or "") for x, p in sides)


def test_a_window_forgets_sinks():
    step, pages = (pool := Pool(WITH_SINKS)).step(LENGTHS)
    arguments = (step, 1.0, *pool.plans, 0.0, 40)
    declined = attention_pages.unsupported_reason(pages[0][-1], pages[0][-1], *pages, *arguments)
    assert declined.endswith("have sinks, which a window forgets")
