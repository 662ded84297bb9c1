"""``kvpass::attention_pages``: attention of many requests, each to its own tokens in pages."""

from __future__ import annotations

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.attention import AttentionArguments, dense_attention
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pages import PagedStep, Pages


def attention_pages(
    out: Tensor,
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    step: list[Tensor],
    scale: float,
    k_plan: str,
    v_plan: str,
    softcap: float = 0.0,
) -> None:
    """Reference of ``kvpass::attention_pages``.

    Each of the step's single queries attends to the tokens of its request up to its own, packed as
    if each of them had had a step of its own. ``kvpass::append_pages`` has packed what is due.

    Args:
        out: ``[N, Hq, D]``, contiguous; the rows of the queries are written.
        q: the queries of the batch, ``[1, Hq, N, D]``.
        keys, values: the tensors of a `Pages` each.
        step: those of a `PagedStep`.
        scale, softcap: see `AttentionArguments`.
        k_plan, v_plan: printed `TensorPlan`.
    """
    of_step, a = PagedStep(*step), AttentionArguments(q, [], [], None, scale, k_plan, v_plan)
    requests = list(of_step.each())
    sides = [(Pages.of(x), parse_plan(p)) for x, p in ((keys, k_plan), (values, v_plan))]
    for number, position in of_step.single.tolist():
        request = requests[number]
        token = request.first + position - request.past
        k, v = (
            x.upto(plan, request, plan.retention.packed_before(position), position + 1)
            for x, plan in sides
        )
        query = q[:, :, token : token + 1]
        out[token] = dense_attention(a._replace(q=query, softcap=softcap), k, v)[0, :, 0]


define(
    "attention_pages(Tensor(a!) out, Tensor q, Tensor[] keys, Tensor[] values, Tensor[] step, "
    "float scale, str k_plan, str v_plan, float softcap=0.0) -> ()",
    attention_pages,
    returns_nothing,
)
