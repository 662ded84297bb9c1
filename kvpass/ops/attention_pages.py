"""``kvpass::attention_pages``: attention of many requests, each to its own tokens in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.attention import AttentionArguments, dense_attention
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pages import PagedStep, Pages


class PagedArguments(NamedTuple):
    """The arguments of ``kvpass::attention_pages``.

    Attributes:
        out: ``[N, Hq, D]``, contiguous; the rows of the queries are written.
        q: the queries of the batch, ``[1, Hq, N, D]``.
        keys, values: the tensors of a `Pages` each.
        step: those of a `PagedStep`.
        scale, softcap, window, sinks: see `AttentionArguments`.
        k_plan, v_plan: printed `TensorPlan`.
    """

    out: Tensor
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    step: list[Tensor]
    scale: float
    k_plan: str
    v_plan: str
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None

    @property
    def sides(self) -> tuple[tuple[list[Tensor], str], tuple[list[Tensor], str]]:
        """Keys and values, each with its plan."""
        return (self.keys, self.k_plan), (self.values, self.v_plan)


def attention_pages(*args: Any) -> None:
    """Reference of ``kvpass::attention_pages``.

    Each of the step's single queries attends to the tokens of its request up to its own, packed as
    if each of them had had a step of its own. ``kvpass::append_pages`` has packed what is due.

    Args:
        args: see `PagedArguments`.
    """
    a = PagedArguments(*args)
    plans = a.k_plan, a.v_plan
    dense = AttentionArguments(a.q, [], [], None, a.scale, *plans, a.sinks, softcap=a.softcap)
    step, sides = PagedStep(*a.step), [(Pages.of(x), parse_plan(plan)) for x, plan in a.sides]
    requests = list(step.each())
    for number, position in step.single.tolist():
        request = requests[number]
        token = request.first + position - request.past
        seen = max(position + 1 - a.window, 0) if a.window else 0
        k, v = (
            x.upto(plan, request, plan.retention.packed_before(position), position + 1, seen)
            for x, plan in sides
        )
        query = a.q[:, :, token : token + 1]
        a.out[token] = dense_attention(dense._replace(q=query), k, v)[0, :, 0]


define(
    "attention_pages(Tensor(a!) out, Tensor q, Tensor[] keys, Tensor[] values, Tensor[] step, "
    "float scale, str k_plan, str v_plan, float softcap=0.0, int window=0, "
    "Tensor? sinks=None) -> ()",
    attention_pages,
    returns_nothing,
)
