"""Tokens of many requests in pages: which page holds which, how they are written and read.

Packed tokens of a request are in the pages that its table names, page ``i`` holding those from
position ``i * page_size`` on; exact ones in pages of their own, with a table of their own. The new
tokens of a step are still in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.format.quantize import decode, encode
from kvpass.format.tensor_plan import TensorPlan


class Request(NamedTuple):
    """A request in a step.

    Attributes:
        past, total: its tokens before the step and after it.
        first: which token of the batch is its first new one.
        table, exact_table: its pages, integers ``[P]``.
    """

    past: int
    total: int
    first: int
    table: Tensor
    exact_table: Tensor


class PagedStep(NamedTuple):
    """A step of a batch of requests, on its device.

    Attributes:
        requests: int32 ``[R, 3]``: ``past``, ``total`` and ``first`` of each `Request`.
        tables, exact_tables: int32 ``[R, P]``; behind the pages that a request has there is
            anything.
        single: int32 ``[S, 2]``: the queries that are attended with one by one, each with the
            number of its request and its position.
    """

    requests: Tensor
    tables: Tensor
    exact_tables: Tensor
    single: Tensor

    def each(self) -> Iterator[Request]:
        """The requests, in their order."""
        numbers: list[list[int]] = self.requests.tolist()
        for i, (past, total, first) in enumerate(numbers):
            yield Request(past, total, first, self.tables[i], self.exact_tables[i])


class Pages(NamedTuple):
    """The keys or the values of a layer in a step.

    Attributes:
        stored: of packed tokens, the fields of `StateLayout.encoded` with pages for the batch, and
            their size for the capacity.
        exact: exact tokens ``[pages, H, page_size, D]``.
        new: tokens of the batch, ``[1, H, N, D]``.
    """

    stored: Sequence[Tensor]
    exact: Tensor
    new: Tensor

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Pages:
        """From the tensors that ops take."""
        return Pages(tensors[:-2], tensors[-2], tensors[-1])

    @property
    def tensors(self) -> list[Tensor]:
        """Inverse of `of`."""
        return [*self.stored, self.exact, self.new]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides, with the plan, who can work on such pages."""
        return *self.exact.shape[1:], self.new.dtype, self.new.device

    def exact_tokens(self, request: Request, start: int, end: int) -> Tensor:
        """Tokens ``start ... end`` of a request as they are, ``[1, H, n, D]``."""
        border, size = min(max(start, request.past), end), self.exact.shape[2]
        at = torch.arange(start, border, device=self.exact.device)
        old = self.exact[request.exact_table[at // size].long(), :, at % size]
        first = request.first - request.past
        new = self.new[:, :, first + border : first + end]
        return torch.cat([old.transpose(0, 1).unsqueeze(0), new], dim=2)

    def write(self, plan: TensorPlan, table: Tensor, start: int, x: Tensor) -> None:
        """Encodes tokens ``x`` ``[1, H, n, D]``, from position ``start`` on, into the pages of a
        table; both whole groups."""
        for field, stored, part in zip(
            plan.layout.encoded(), self.stored, encode(plan.codec, x), strict=True
        ):
            entries = stored.movedim(field.token_dim, 1)
            first, count, size = start // field.group, x.shape[2] // field.group, entries.shape[1]
            at = torch.arange(first, first + count, device=x.device)
            entries[table[at // size].long(), at % size] = part[0].movedim(field.token_dim - 1, 0)

    def read(self, plan: TensorPlan, table: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
        """The first ``tokens`` in the pages of a table, whole groups, decoded:
        ``[1, H, tokens, D]``."""
        parts = []
        for field, stored in zip(plan.layout.encoded(), self.stored, strict=True):
            used = table[: -(-tokens // field.room(stored))]
            dim = field.token_dim - 1
            found = stored.index_select(0, used).movedim(0, dim).flatten(dim, dim + 1)
            parts.append(field.tokens(found.unsqueeze(0), 0, tokens).contiguous())
        return decode(plan.codec, parts, dtype)

    def upto(
        self, plan: TensorPlan, request: Request, packed: int, end: int, start: int = 0
    ) -> Tensor:
        """Tokens ``start ... end`` of a request, those before ``packed``, but for sinks, decoded:
        ``[1, H, end - start, D]``. Pages before the one of ``start`` are not read."""
        size, border = self.exact.shape[2], max(start, min(plan.sinks, packed))
        page = start // size
        first = self.exact_tokens(request, start, border)
        last = self.exact_tokens(request, max(packed, start), end)
        count = max(packed - page * size, 0)
        old = self.read(plan, request.table[page:], count, last.dtype)[:, :, border - page * size :]
        return torch.cat([first, old, last], dim=2)
