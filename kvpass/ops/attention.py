"""``kvpass::attention``: softmax attention over packed keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpass.cache.residency import TensorPlan
from kvpass.ops.append import row_ends
from kvpass.ops.library import define
from kvpass.ops.unpack import unpack

SCHEMA = (
    "attention(Tensor q, Tensor[] keys, Tensor[] values, Tensor? mask, float scale, "
    "str k_plan, str v_plan) -> Tensor"
)


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
) -> Tensor:
    """Reference of ``kvpass::attention``: decode, then dense attention.

    The query heads that share a KV head are laid out as rows of one matrix; torch's ``enable_gqa``
    would copy keys and values once per query head.

    Args:
        q: ``[B, Hq, n, D]``; ``Hq`` a multiple of the KV heads ``H``.
        keys, values: states, see `kvpass.ops.pack.empty_state`.
        mask: bool (True is visible) or additive, broadcastable to ``[B, Hq, n, T]``; None: all
        visible.
        scale: multiplies the scores.
        k_plan, v_plan: printed `TensorPlan`.

    Returns:
        ``[B, Hq, n, Dv]``, contiguous, in the dtype of ``q``.
    """
    k = _dense(keys, k_plan, q.dtype)
    v = _dense(values, v_plan, q.dtype)
    b, heads, n, d = q.shape
    groups = heads // k.shape[1]
    rows = q.reshape(b, k.shape[1], groups * n, d)
    if mask is not None:
        mask = mask_rows(mask, k.shape[1], groups, n)
    out = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.reshape(b, heads, n, v.shape[3]).contiguous()


def _dense(state: list[Tensor], plan: str, dtype: torch.dtype) -> Tensor:
    tokens = row_ends(state[-1])[-1]
    if TensorPlan.parse(plan).codec.identity:
        return state[0][:, :, :tokens]
    return unpack(state, tokens, plan, dtype)


def mask_rows(mask: Tensor, kv_heads: int, groups: int, n: int) -> Tensor:
    """A mask ``[B|1, Hq|1, n|1, T]`` for queries laid out as ``[B, H, groups * n, D]``."""
    if mask.shape[1] == 1:
        return mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)
    return mask.expand(-1, -1, n, -1).reshape(mask.shape[0], kv_heads, groups * n, mask.shape[3])


def attention_fake(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
) -> Tensor:
    """Shape of `attention`."""
    like = values[0] if TensorPlan.parse(v_plan).codec.identity else values[2]
    return q.new_empty((*q.shape[:3], like.shape[3]))


define(SCHEMA, attention, attention_fake)
