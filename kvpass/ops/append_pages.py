"""``kvpass::append_pages``: what is due of many requests joins the packed tokens in their pages."""

from __future__ import annotations

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pages import PagedStep, Pages


def append_pages(pages: list[Tensor], step: list[Tensor], plan: str) -> None:
    """Reference of ``kvpass::append_pages``: packs, of each request, the tokens that are packed
    when the last of the step has a step of its own, and were not before. New tokens join no page of
    exact tokens: others may still be read there.

    Args:
        pages: the tensors of a `Pages`; those of packed tokens are written.
        step: those of a `PagedStep`.
        plan: a printed `TensorPlan`.
    """
    tensors, p = Pages.of(pages), parse_plan(plan)
    for request in PagedStep(*step).each():
        start = max(p.retention.packed_before(request.past - 1), p.sinks)
        end = p.retention.packed_before(request.total - 1)
        if end > start:
            tensors.write(p, request.table, start, tensors.exact_tokens(request, start, end))


define(
    "append_pages(Tensor(a!)[] pages, Tensor[] step, str plan) -> ()",
    append_pages,
    returns_nothing,
)
