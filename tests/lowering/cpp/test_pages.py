"""Generated C++ over pages of many requests: against the references, with poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvpass.format.layout import codec_sizes
from kvpass.format.parse import parse_plan
from kvpass.ops.append_pages import append_pages as append_reference
from kvpass.ops.attention_pages import attention_pages as attention_reference
from kvpass.ops.pages import PagedStep
from lowering.cpp import append_pages, attention_pages
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import (
    NAN_PARAMS,
    POISON_WORD,
    keys_like,
    kivi,
    relative_error,
)

# Tokens of requests that take steps together: prompts and decode steps, short and long ones.
LENGTHS = (1, 40, 127, 128, 129, 200, 257, 500)


@dataclass
class Pool:
    """Pages of keys and values in poisoned memory, which requests take in no order."""

    plans: tuple[str, str]
    heads: int = 2
    dim: int = 64
    page: int = 64
    dtype: torch.dtype = torch.float32
    pages: int = 64
    lengths: list[int] = field(default_factory=lambda: [0] * len(LENGTHS))

    def __post_init__(self) -> None:
        mixed = torch.randperm(self.pages, generator=torch.Generator().manual_seed(5)).int()
        self.free = mixed.tolist()
        self.tables: list[list[int]] = [[] for _ in self.lengths]
        self.sides = [self.side(plan) for plan in self.plans]
        shape = (self.pages, self.heads, self.page, self.dim)
        self.exact = [torch.full(shape, torch.nan, dtype=self.dtype) for _ in self.plans]

    def side(self, plan: str) -> list[Tensor]:
        """The fields of packed pages: views of rows of bytes, as a pool has them."""
        p, like = parse_plan(plan), torch.empty(0, dtype=self.dtype)
        sizes = {"batch": 1, "heads": self.heads, "channels": self.dim, "capacity": self.page}
        sizes |= codec_sizes(p.codec, "", self.heads, self.dim)
        empty = [f.empty(like, sizes) for f in p.layout.encoded()]
        row = sum(-(-t.nbytes // 64) * 64 for t in empty) + 64
        rows, offset, found = torch.zeros(self.pages, row, dtype=torch.uint8), 0, []
        for t in empty:
            view = rows[:, offset : offset + t.nbytes].view(t.dtype).unflatten(1, t.shape[1:])
            poison = POISON_WORD if t.dtype == torch.int16 and not found else None
            view.fill_(NAN_PARAMS.get(t.dtype, torch.nan) if poison is None else poison)
            found.append(view)
            offset += -(-t.nbytes // 64) * 64
        return found

    def step(self, new: tuple[int, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """A step of so many new tokens of each request: what ops take of it, with all queries."""
        requests, single, first = [], [], 0
        for i, n in enumerate(new):
            past = self.lengths[i]
            self.lengths[i] = total = past + n
            while len(self.tables[i]) * self.page < total:
                self.tables[i].append(self.free.pop())
            requests.append([past, total, first])
            single += [[i, position] for position in range(past, total)]
            first += n
        tables = torch.full((len(new), max(map(len, self.tables))), 10**6, dtype=torch.int32)
        for row, table in zip(tables, self.tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        of_requests, of_single = (torch.tensor(x, dtype=torch.int32) for x in (requests, single))
        step = list(PagedStep(of_requests, tables, self.pages - 1 - tables, of_single))
        made = [keys_like(1, first, self.heads, self.dim, self.dtype, seed) for seed in (1, 2)]
        # As a model's transposed projections are.
        sides = zip(self.sides, self.exact, made, strict=True)
        return step, [[*side, exact, x.transpose(1, 2)] for side, exact, x in sides]

    def keep(self, step: list[Tensor], pages: list[list[Tensor]]) -> None:
        """New tokens join the exact pages."""
        for request in PagedStep(*step).each():
            for *_, exact, new in pages:
                for t in range(request.past, request.total):
                    page = exact[request.exact_table[t // self.page]]
                    page[:, t % self.page] = new[0, :, request.first + t - request.past]


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def attended(pool: Pool, step, pages, heads: int, softcap: float = 0.0) -> float:
    """The relative error of the queries of a step."""
    g = torch.Generator().manual_seed(9)
    count = pages[0][-1].shape[2]
    q = torch.randn(1, count, heads, pool.dim, generator=g).to(pool.dtype).transpose(1, 2)
    arguments = (step, pool.dim**-0.5, *pool.plans, softcap)
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


def check(pool: Pool, heads: int = 8, softcap: float = 0.0) -> None:
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
            error = attended(pool, step, pages, heads, softcap)
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


def test_groups_of_several_heads():
    check(Pool((f"int2.token128.fp8/{SINKS}", f"int2.token128.fp8/{SINKS}")), heads=4)
