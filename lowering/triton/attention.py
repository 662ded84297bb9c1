"""``kvpass::attention`` in Triton: split-K decode attention and the merge of the splits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.format.retention import MAX_STEP
from kvpass.ops.attention import AttentionArguments, with_signature
from lowering.codegen import load_kernels
from lowering.support import dense, interpreted, unsupported_formats
from lowering.triton.heuristics import MAX_ROWS, AttentionSizes, attention_sizes, dequant_first
from lowering.triton.launch import launch, on_nvidia
from lowering.triton.layouts import (
    NewTokens,
    cos_sin_stride,
    layout_of,
    rooms,
    unsupported_codec,
    unsupported_decoding,
    unsupported_device,
    unsupported_dtype,
    unsupported_new,
    unsupported_state,
)
from lowering.triton.timing import time_attention
from lowering.triton.tuning import (
    Workload,
    measurable,
    nominal_batch,
    nominal_capacity,
    tuned_sizes,
)
from triton_templates import Layout, next_power_of_2, render

LOG2_E = math.log2(math.e)
# Numbers that a program of the merge reads at a time, of all splits: as many as registers hold.
_MERGED = 8192
# Its channels, at most: more programs than heads keep more of the memory busy.
_MERGED_CHANNELS = 32


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::attention``, or None."""
    a = AttentionArguments(*args, **kwargs)
    q, (keys, values) = a.q, a.states
    k, v = keys.tokens, values.tokens
    if reason := unsupported_formats(q, keys, values):
        return reason
    if reason := unsupported_codec(a.k_plan) or unsupported_codec(a.v_plan):
        return reason
    layouts = layout_of(a.k_plan, int(k.shape[3])), layout_of(a.v_plan, int(v.shape[3]))
    if dequant_first(*layouts):
        if reason := unsupported_decoding(a.k_plan, a.v_plan, *layouts):
            return reason
    elif layouts[0].lanewise:
        return f"the groups of keys {a.k_plan} are too short at head_dim {k.shape[3]}"
    if reason := unsupported_query(a, k.shape[1]):
        return reason
    if q.shape[2] > MAX_STEP and keys.plan.window_size is not None:
        return f"{q.shape[2]} new tokens are a prefill; a ring has room for {MAX_STEP}"
    for name, state, plan in (("keys", a.keys, a.k_plan), ("values", a.values, a.v_plan)):
        if reason := unsupported_state(state, plan):
            return f"{name}: {reason}"
    return None


def unsupported_query(a: AttentionArguments, kv_heads: int) -> str | None:
    """Why the kernels decline the query, its mask or its device, or None."""
    q, mask = a.q, a.mask
    if reason := unsupported_new(q.shape[2]):
        return reason
    rows = most_rows(a, kv_heads)
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; the kernels take {MAX_ROWS}"
    for x, name in ((mask, "the mask"), (q, "the query")):
        if x is not None and x.dtype != torch.bool and (reason := unsupported_dtype(x, name)):
            return reason
    return unsupported_device(q)


def most_rows(a: AttentionArguments, kv_heads: int) -> int:
    """Query rows of a KV head, at most."""
    return a.q.shape[1] // kv_heads * NewTokens.of(a.q.shape[2]).most


@with_signature(AttentionArguments)
def attention(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that are supported."""
    a = AttentionArguments(*args, **kwargs)
    return attend(best_sizes(a), *a)


@with_signature(AttentionArguments)
def attention_partial(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.attention_partial.attention_partial`, for arguments that are supported."""
    a = AttentionArguments(*args, **kwargs)
    return attend(best_sizes(a), *a, with_weight=True)


def best_sizes(a: AttentionArguments) -> AttentionSizes:
    """By measurement where there is a GPU, else by the table."""
    q, (keys, values) = a.q, a.states
    batch, head_dim = q.shape[0], q.shape[3]
    kv_heads, value_dim = keys.tokens.shape[1], values.tokens.shape[3]
    k, v = layout_of(a.k_plan, head_dim), layout_of(a.v_plan, value_dim)
    rows, capacity = most_rows(a, kv_heads), keys.capacity
    table = attention_sizes(k, v, rows, batch * kv_heads, capacity, q)
    if not measurable(q.device):
        return table
    workload = Workload(
        a.k_plan, a.v_plan, head_dim, value_dim, q.dtype,
        nominal_batch(batch), kv_heads, rows, nominal_capacity(capacity),
    )  # fmt: skip
    return tuned_sizes(
        workload,
        table,
        q.device,
        source=lambda sizes: render("attention", **_parameters(a, (k, v), sizes, advances=False)),
        timer=partial(time_attention, attend),
    )


def _parameters(
    a: AttentionArguments, layouts: tuple[Layout, Layout], sizes: AttentionSizes, advances: bool
) -> dict[str, Any]:
    """The variables of the template."""
    tiles = {"tile": sizes.tile, "part": sizes.part, "edge_tile": sizes.edge_tile}
    varies = NewTokens.of(a.q.shape[2]).varies
    return {"k": layouts[0], "v": layouts[1], **tiles, "advances": advances, "new_varies": varies}


class Advance(NamedTuple):
    """Segment ends that have not moved yet past the tokens of the step, and are to be.

    Attributes:
        ends: of keys and of values.
        ages: constants of the kernels that say when tokens are packed.
    """

    ends: tuple[Tensor, Tensor]
    ages: dict[str, Any]


def attend(
    sizes: AttentionSizes,
    *args: Any,
    advance: Advance | None = None,
    with_weight: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`attention`, or `attention_partial` if ``with_weight``, with these sizes, on which the result
    does not depend but for rounding."""
    a = AttentionArguments(*args, **kwargs)
    keys, values = a.states
    k = layout_of(a.k_plan, a.q.shape[3])
    v = layout_of(a.v_plan, values.tokens.shape[3])
    if dequant_first(k, v):
        splits = sizes.splits + sizes.edge_splits
        more: dict[str, Any] = {"cos_sin_batch": cos_sin_stride(keys)}
    else:
        # Packed tokens at the edge, each combination of packed and exact, and sinks.
        edges = (1 if k.identity else 2) * (1 if v.identity else 2)
        splits = sizes.splits + edges * sizes.edge_splits + int(k.sinks > 0 or v.sinks > 0)
        more = {"window_size": keys.plan.window_size or 0}
    kv_heads = keys.tokens.shape[1]
    sums = empty_sums(a.q, a.q.shape[0] * kv_heads, query_rows(a, kv_heads), v.head_dim, splits)
    launch_splits(a, (k, v), sizes, sums, splits, advance, **more)
    return merged(a, (k, v), sizes, sums, advance, with_weight)


def query_rows(a: AttentionArguments, kv_heads: int) -> int:
    """Query rows of a KV head."""
    return a.q.shape[1] // kv_heads * a.q.shape[2]


# Weighted sums [B * Hkv, splits, rows, Dv], and the largest scores and sums of weights
# [B * Hkv, splits, 2, rows], float32.
Sums = tuple[Tensor, Tensor]


def empty_sums(q: Tensor, pairs: int, rows: int, value_dim: int, splits: int) -> Sums:
    """What so many splits will write, on the device of ``q``."""
    partial = q.new_empty((pairs, splits, rows, value_dim), dtype=torch.float32)
    return partial, q.new_empty((pairs, splits, 2, rows), dtype=torch.float32)


def launch_splits(
    a: AttentionArguments,
    layouts: tuple[Layout, Layout],
    sizes: AttentionSizes,
    sums: Sums,
    splits: int,
    advance: Advance | None = None,
    **more: Any,
) -> None:
    """Launches ``attention_split``.

    Args:
        a: see `AttentionArguments`; keys and values are the tensors that their layouts name. Plans
            and sinks are not looked at.
        layouts: of keys and of values.
        sizes: of the launch.
        sums: to be written.
        splits: programs that share the tokens of a KV head.
        advance: if the ends are those before the step.
        more: the arguments that not every kernel has, and constants that differ.
    """
    q = dense(a.q)
    queries, head_dim = q.shape[2:]
    pairs, _, rows, value_dim = sums[0].shape
    kernels = load_kernels("attention", **_parameters(a, layouts, sizes, advance is not None))
    states = (*a.keys, *rooms(a.keys, layouts[0]), *a.values, *rooms(a.values, layouts[1]))
    kind, mask, mask_strides = _mask_arguments(q, a.mask)
    launch(
        kernels.attention_split, (pairs * -(-rows // sizes.columns), splits),
        q, *states, mask=mask, partial=sums[0], statistics=sums[1],
        query_batch=q.stride(0), query_head=q.stride(1), query_token=q.stride(2),
        mask_batch=mask_strides[0], mask_head=mask_strides[1], mask_query=mask_strides[2],
        mask_token=mask_strides[3], scale=a.scale * LOG2_E, cap=a.softcap * LOG2_E,
        window=a.window,
        KV_HEADS=a.keys[0].shape[1], QUERIES=queries, ROWS=rows, COLUMNS=sizes.columns,
        SPLITS=sizes.splits, EDGE_SPLITS=sizes.edge_splits, MASK=kind,
        FULL=q.dtype == torch.float32, WIDE=q.dtype == torch.float32 or interpreted(),
        **{"CAUSAL": a.causal} | more, WINDOWED=a.window > 0, CAPPED=a.softcap > 0,
        INLINE_ASM=on_nvidia(), num_warps=sizes.warps, num_stages=sizes.stages,
        step_elements=sizes.tile * (head_dim + value_dim), layouts=layouts,
        **({} if advance is None else advance.ages),
    )  # fmt: skip


def merged(
    a: AttentionArguments,
    layouts: tuple[Layout, Layout],
    sizes: AttentionSizes,
    sums: Sums,
    advance: Advance | None = None,
    with_weight: bool = False,
) -> Tensor:
    """Attention's result from what all splits have written, the last ones with these layouts and
    sizes. Moves the ends if that is still to be done. With the weight of the tokens among others
    the result is that of `attention_partial`."""
    kernels = load_kernels("attention", **_parameters(a, layouts, sizes, advance is not None))
    batch, heads, queries, _ = a.q.shape
    value_dim = sums[0].shape[3]
    shape = batch, heads, queries, value_dim + with_weight
    out = a.q.new_empty(shape, dtype=torch.float32 if with_weight else a.q.dtype)
    launch_merge(kernels, sums, out, a.keys[0].shape[1], queries, a.sinks, advance, with_weight)
    return out


def launch_merge(
    kernels: Any,
    sums: Sums,
    out: Tensor,
    kv_heads: int,
    queries: int,
    sinks: Tensor | None = None,
    advance: Advance | None = None,
    with_weight: bool = False,
) -> None:
    """Launches ``attention_merge``, which writes ``out``; see `merged`."""
    pairs, splits, rows, value_dim = sums[0].shape
    padded = next_power_of_2(splits)
    channels = min(_MERGED_CHANNELS, next_power_of_2(value_dim), max(1, _MERGED // padded))
    ends, ages = ((), {}) if advance is None else advance
    if sinks is not None and (unsupported_dtype(sinks, "sinks") or not sinks.is_contiguous()):
        sinks = sinks.float().contiguous()
    launch(
        kernels.attention_merge, (pairs, rows * -(-value_dim // channels)),
        *sums, out if sinks is None else sinks, out, *ends,
        KV_HEADS=kv_heads, QUERIES=queries, ROWS=rows, SPLITS=splits,
        SPLITS_PADDED=padded, CHANNELS=channels, SINKS=sinks is not None, PARTIAL=with_weight,
        **ages,
    )  # fmt: skip


def _mask_arguments(q: Tensor, mask: Tensor | None) -> tuple[int, Tensor, tuple[int, ...]]:
    """The kernel's ``MASK``, a tensor to pass, and its strides over ``[B, Hq, n, T]``."""
    if mask is None:
        return 0, q, (0, 0, 0, 0)
    wide = mask.expand(*q.shape[:3], mask.shape[-1])
    return (1 if mask.dtype == torch.bool else 2), wide, wide.stride()
