"""What both back ends ask of plans and states, and the reasons to decline that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kvpass.format.codec import Codec
from kvpass.format.parse import parse_plan
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.append_attention import StepArguments
from kvpass.ops.attention_pages import PagedArguments


@cache
def interpreted() -> bool:
    """Whether Triton runs in its interpreter (``TRITON_INTERPRET=1`` when it was imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def unbounded(plan: TensorPlan) -> TensorPlan:
    """The plan without window size and room, which kernels get at run time."""
    return replace(plan, window_size=None, room=None)


def dense(x: Tensor) -> Tensor:
    """``x``, or a copy of it whose last dimension is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def row_stride(rows: Tensor) -> int:
    """The stride from one sequence's cosines and sines ``[B or 1, n, R]`` to the next one's; 0
    where all sequences have the same ones."""
    return rows.stride(0) if rows.shape[0] != 1 else 0


def unsupported_conversion(exact: Tensor, dtype: torch.dtype) -> str | None:
    """Why no kernel unpacks a cache whose exact tokens are ``exact`` to ``dtype``, or None."""
    if dtype != exact.dtype:
        return f"tokens are wanted as {dtype}, those of the cache are {exact.dtype}"
    return None


def unsupported_formats(q: Tensor, keys: State, values: State) -> str | None:
    """Why no kernel attends with this query to these keys and values, or None."""
    if reason := unsupported_plans(str(keys.plan), str(values.plan)):
        return reason
    dtypes = keys.tokens.dtype, values.tokens.dtype
    if {q.dtype} != {*dtypes}:
        return f"the query is {q.dtype}, keys are {dtypes[0]}, values {dtypes[1]}"
    return None


@cache
def unsupported_plans(keys: str, values: str) -> str | None:
    """Why no kernel attends to tokens stored by these printed plans together, or None."""
    k, v = parse_plan(keys), parse_plan(values)
    if k.window_size != v.window_size:
        return f"keys {k} and values {v} do not keep the same tokens"
    if len({p.sinks for p in (k, v) if not p.codec.identity}) > 1:
        return f"keys {k} and values {v} do not have the same sinks"
    if v.codec.token_group > 1:
        return f"values {v} have groups along tokens"
    return None


def unsupported_calibrated(plan: str) -> str | None:
    """Why no kernel works on what this plan calibrates, or None."""
    p = parse_plan(plan)
    found = {
        "keys before their rotary embedding": p.rope is not None,
        "codebooks": p.codec.codebook is not None,
        "calibrated ranges": p.codec.static_ranges,
    }
    reason = next((f"{name} are not supported" for name, holds in found.items() if holds), None)
    return reason or unsupported_extras(p.codec)


def unsupported_extras(codec: Codec, *known: str) -> str | None:
    """Why kernels that know these extras only cannot work on a codec, or None."""
    extras = (e.name for e in codec.extras if e.size and e.name not in known)
    return next((f"{name.replace('_', ' ')} are not supported" for name in extras), None)


def unsupported_groups(codec: Codec, head_dim: int | None = None) -> str | None:
    """Why no kernel works on the groups of a codec, or None."""
    if codec.sizes is not None:
        return f"sizes of {codec} are not supported"
    if head_dim is not None and codec.groups.heads_per_group(head_dim) > 1:
        return f"groups of {codec} that span heads of {head_dim} are not supported"
    return None


def unsupported_gaps(state: Sequence[Tensor], plan: str) -> str | None:
    """Why no kernel can address this state, or None."""
    # The state of an append comes without what all layers share.
    for name, tensor in zip(parse_plan(plan).layout.names, state, strict=False):
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
    return None


def unsupported_basis(step: StepArguments) -> str | None:
    """Why no kernel brings new keys and the query to this basis, or None."""
    if step.basis is None:
        return None
    if step.cos_sin is not None:
        return "keys get their rotary embedding and a basis"
    batch, of_heads, tokens, *_ = step.basis.shape
    heads = int(step.new_keys.shape[1])
    if step.basis.dtype != torch.float32 or (batch, tokens) != (1, 1) or of_heads not in (1, heads):
        return f"a basis {step.basis.dtype} {tuple(step.basis.shape)} is not one of {heads} heads"
    return None


def unsupported_window(a: PagedArguments) -> str | None:
    """Why no kernel attends to pages so, or None."""
    if a.window and any(parse_plan(plan).sinks for _, plan in a.sides):
        return f"keys {a.k_plan} and values {a.v_plan} have sinks, which a window forgets"
    return None


def unsupported_pages(pages: Sequence[Tensor], plan: str) -> str | None:
    """Why no kernel can address the tensors of a `kvpass.ops.pages.Pages`, or None."""
    if parse_plan(plan).retained:
        return f"{plan} has retained tokens, which are in no pages"
    *stored, exact, new = pages
    names = [field.name for field in parse_plan(plan).layout.encoded()]
    # Of each field one page is dense, and all have the same bytes between pages.
    if {t.stride(0) * t.itemsize for t in stored} != {stored[0].stride(0) * stored[0].itemsize}:
        return "fields have their pages at different distances"
    for name, tensor in zip((*names, "exact"), (*(t[0] for t in stored), exact), strict=True):
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
    if exact.dtype != new.dtype:
        return f"new tokens are {new.dtype}, those in pages {exact.dtype}"
    return None
