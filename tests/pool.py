"""A pool of pages in poisoned memory, for tests of the ops that work on pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpass.format.layout import codec_sizes
from kvpass.format.parse import parse_plan
from kvpass.ops.pages import PagedStep
from tests.triton_templates.kernel_reference import NAN_PARAMS, POISON_WORD, keys_like

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
    # Positions that queries see, 0: all. Pages before them are poisoned again, but for those that
    # tokens are still packed from.
    window: int = 0

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
            found.append(view)
            offset += -(-t.nbytes // 64) * 64
        self.poison(found, slice(None))
        return found

    @staticmethod
    def poison(side: list[Tensor], pages: slice | int) -> None:
        """Fills pages with what no one may read."""
        for i, t in enumerate(side):
            poison = POISON_WORD if t.dtype == torch.int16 and not i else None
            t[pages] = NAN_PARAMS.get(t.dtype, torch.nan) if poison is None else poison

    def step(self, new: tuple[int, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """A step of so many new tokens of each request: what ops take of it, with all queries."""
        requests, single, first = [], [], 0
        for i, n in enumerate(new):
            past = self.lengths[i]
            if self.window:
                packed = [parse_plan(plan).retention.packed_before(past) for plan in self.plans]
                seen = min(max(past + 1 - self.window, 0), *packed)
                self.forget(self.tables[i][: seen // self.page])
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

    def forget(self, pages: list[int]) -> None:
        """Poisons pages that no later step looks at."""
        for page in pages:
            for side, exact in zip(self.sides, self.exact, strict=True):
                self.poison(side, page)
                exact[self.pages - 1 - page] = torch.nan

    def keep(self, step: list[Tensor], pages: list[list[Tensor]]) -> None:
        """New tokens join the exact pages."""
        for request in PagedStep(*step).each():
            for *_, exact, new in pages:
                for t in range(request.past, request.total):
                    page = exact[request.exact_table[t // self.page]]
                    page[:, t % self.page] = new[0, :, request.first + t - request.past]


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return x.contiguous().view(torch.uint8)
