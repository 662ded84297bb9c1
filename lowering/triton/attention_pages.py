"""``kvpass::attention_pages`` in Triton: one launch for all requests of a step, and their merge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from kvpass.format.parse import parse_plan
from kvpass.ops.attention import with_signature
from kvpass.ops.attention_pages import PagedArguments
from kvpass.ops.pages import PagedStep, Pages
from lowering.codegen import load_kernels
from lowering.support import (
    dense,
    interpreted,
    unsupported_pages,
    unsupported_plans,
    unsupported_window,
)
from lowering.triton.append_pages import codes_and_qparams, unsupported_in_pages
from lowering.triton.attention import LOG2_E, empty_sums, launch_merge
from lowering.triton.heuristics import MAX_ROWS, AttentionSizes, attention_sizes
from lowering.triton.launch import launch, on_nvidia
from lowering.triton.layouts import layout_of, unsupported_device, unsupported_dtype
from triton_templates import Layout


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::attention_pages``, or None."""
    a = PagedArguments(*args, **kwargs)
    if reason := unsupported_plans(a.k_plan, a.v_plan) or unsupported_dtype(a.q, "the query"):
        return reason
    if a.q.dtype != a.keys[-1].dtype:
        return f"queries are {a.q.dtype}, keys {a.keys[-1].dtype}"
    if reason := unsupported_window(a):
        return reason
    for pages, plan in a.sides:
        if reason := unsupported_pages(pages, plan) or unsupported_in_pages(pages, plan):
            return reason
    if _layouts(a)[0].lanewise:
        return f"the groups of keys {a.k_plan} are too short at head_dim {a.q.shape[3]}"
    if (rows := _rows(a)) > MAX_ROWS:
        return f"{rows} query rows share a KV head; the kernels take {MAX_ROWS}"
    return unsupported_device(a.q)


def _layouts(a: PagedArguments) -> tuple[Layout, Layout]:
    return layout_of(a.k_plan, a.q.shape[3]), layout_of(a.v_plan, a.q.shape[3])


def _rows(a: PagedArguments) -> int:
    """Query rows of a KV head."""
    return a.q.shape[1] // a.keys[-1].shape[1]


@with_signature(PagedArguments, returns=None)
def attention_pages(*args: Any, **kwargs: Any) -> None:
    """As `kvpass.ops.attention_pages.attention_pages`, for arguments that are supported."""
    a = PagedArguments(*args, **kwargs)
    k, v = layouts = _layouts(a)
    step, keys, values = PagedStep(*a.step), Pages.of(a.keys), Pages.of(a.values)
    kv_heads, page, head_dim = keys.exact.shape[1:]
    rows, count = _rows(a), step.single.shape[0]
    sizes = _sizes(a, layouts, count * kv_heads, page)
    splits = sizes.splits + 4 * sizes.edge_splits + int(k.sinks > 0)
    sums = empty_sums(a.q, count * kv_heads, rows, head_dim, splits)
    kernels = load_kernels(
        "attention_pages", k=k, v=v, tile=sizes.tile, part=sizes.part, edge_tile=sizes.edge_tile
    )
    q, new = dense(a.q), [dense(x.new) for x in (keys, values)]
    strides = [
        (*(t.stride(0) for t in codes_and_qparams(x)), x_new.stride(1), x_new.stride(2))
        for x, x_new in zip((keys, values), new, strict=True)
    ]
    ages = {
        f"{name}_{field.upper()}": getattr(parse_plan(plan).retention, field)
        for name, plan in (("K", a.k_plan), ("V", a.v_plan))
        for field in ("window", "pack_every")
    }
    launch(
        kernels.attention_split, (count * kv_heads * -(-rows // sizes.columns), splits),
        q, *codes_and_qparams(keys), keys.exact, new[0],
        *codes_and_qparams(values), values.exact, new[1],
        step.requests, step.tables, step.exact_tables, step.single, *sums,
        q.stride(1), q.stride(2), step.tables.stride(0), step.exact_tables.stride(0),
        *strides[0], *strides[1], scale=a.scale * LOG2_E, cap=a.softcap * LOG2_E,
        KV_HEADS=kv_heads, ROWS=rows, COLUMNS=sizes.columns, PAGE=page, SPLITS=sizes.splits,
        WINDOW=a.window, EDGE_SPLITS=sizes.edge_splits, FULL=q.dtype.itemsize == 4,
        WIDE=q.dtype.itemsize == 4 or interpreted(), CAPPED=a.softcap > 0,
        INLINE_ASM=on_nvidia(), num_warps=sizes.warps, num_stages=sizes.stages,
        step_elements=2 * sizes.tile * head_dim, layouts=layouts, **ages,
    )  # fmt: skip
    out = a.q.new_empty((count, kv_heads * rows, head_dim))
    launch_merge(kernels, sums, out, kv_heads, queries=1, sinks=a.sinks)
    past, _, first = step.requests.index_select(0, step.single[:, 0]).unbind(1)
    a.out.index_copy_(0, (first + step.single[:, 1] - past).long(), out)


def _sizes(
    a: PagedArguments, layouts: tuple[Layout, Layout], pairs: int, page: int
) -> AttentionSizes:
    """The table's sizes, in tiles that pages hold. Numbers of splits are powers of two: batches of
    all sizes share a few kernels."""
    capacity = a.step[1].shape[1] * page
    if a.window:
        # Splits share what is seen, however long the request is.
        capacity = min(capacity, a.window)
    table = attention_sizes(*layouts, _rows(a), pairs, capacity, a.q)
    tile = math.gcd(table.tile, page)
    part = min(table.part, tile)
    return replace(
        table, tile=tile, part=part, edge_tile=min(table.edge_tile, part),
        splits=1 << (table.splits.bit_length() - 1),
        edge_splits=1 << (table.edge_splits.bit_length() - 1),
    )  # fmt: skip
