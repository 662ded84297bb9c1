"""``kvpass::attention``: softmax attention over packed keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpass.format.state import State
from kvpass.ops.append import row_ends
from kvpass.ops.library import define
from kvpass.ops.unpack import unpack

SCHEMA = (
    "attention(Tensor q, Tensor[] keys, Tensor[] values, Tensor? mask, float scale, "
    "str k_plan, str v_plan, Tensor? sinks=None, bool causal=False, int window=0, "
    "float softcap=0.0) -> Tensor"
)


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Reference of ``kvpass::attention``: decode, then dense attention.

    The step's ``n`` tokens have been appended; of the ``T`` tokens stored it sees the last ``L``,
    see `TensorPlan.visible`: all of them unless a window slides. Query ``i`` stands at position
    ``T - n + i``. The query heads that share a KV head are laid out as rows of one matrix; torch's
    ``enable_gqa`` would copy keys and values once per query head.

    Args:
        q: ``[B, Hq, n, D]``; ``Hq`` a multiple of the KV heads ``H``.
        keys, values: states, see `kvpass.format.state.State`.
        mask: bool (True is visible) or additive, broadcastable to ``[B, Hq, n, L]`` (further
            columns are not looked at: a static cache's mask covers its whole buffer); None: all
            visible.
        scale: multiplies the scores.
        k_plan, v_plan: printed `TensorPlan`.
        sinks: ``[Hq]``, one more score per head, which takes weight and has no value (gpt-oss).
        causal: a query does not see later positions.
        window: a query sees this many positions, its own counted, and none before; 0: all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; 0: they stay.

    Returns:
        ``[B, Hq, n, Dv]``, contiguous, in the dtype of ``q``.
    """
    n = q.shape[2]
    k, v = _dense(keys, k_plan, n, q.dtype), _dense(values, v_plan, n, q.dtype)
    return dense_attention(q, k, v, mask, scale, sinks, causal, window, softcap)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """`attention` over plain keys and values ``[B, H, L, D]``."""
    b, heads, n, d = q.shape
    groups = heads // k.shape[1]
    rows = q.reshape(b, k.shape[1], groups * n, d)
    mask = _bounded(mask, n, k.shape[2], causal, window, q.device)
    if mask is not None:
        mask = mask_rows(mask, k.shape[1], groups, n)
    # SDPA takes no mask of higher precision than the query's (ALiBi in float32, say).
    wide = mask is not None and mask.dtype not in (torch.bool, q.dtype)
    if softcap or sinks is not None or wide:
        columns = None if sinks is None else sinks.view(1, -1, 1, 1).expand(b, -1, n, 1)
        if columns is not None:
            columns = columns.reshape(b, k.shape[1], groups * n, 1)
        out = _capped(rows, k, v, mask, scale, softcap, columns)
    else:
        out = scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    return out.reshape(b, heads, n, v.shape[3]).contiguous()


def _dense(state: list[Tensor], plan: str, n: int, dtype: torch.dtype) -> Tensor:
    s = State.of(state, plan)
    p, total = s.plan, row_ends(s.segment_ends)[-1]
    if p.codec.identity and p.keep is None and p.rope is None:
        return s.codes[:, :, :total]
    return unpack(state, p.visible(total, n), plan, dtype)


def _bounded(
    mask: Tensor | None, n: int, length: int, causal: bool, window: int, device: torch.device
) -> Tensor | None:
    """``mask``, its first ``length`` columns, with what the bounds hide hidden too."""
    if mask is not None:
        mask = mask[..., :length]
    if not causal and not window:
        return mask
    key = torch.arange(length, device=device)
    query = (length - n + torch.arange(n, device=device)).unsqueeze(1)
    seen = torch.ones(n, length, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= query
    if window:
        seen &= key > query - window
    if mask is None:
        return seen.view(1, 1, n, length)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _capped(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """What SDPA has no arguments for; in float32."""
    scores = rows.float() @ k.float().transpose(2, 3) * scale
    return (attention_weights(scores, mask, softcap, sinks) @ v.float()).to(rows.dtype)


def attention_weights(
    scores: Tensor, mask: Tensor | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Softmax of scores ``[B, H, rows, T]``, which are capped and masked before.

    ``mask``: bool (True is visible) or additive; ``sinks``: one more score ``[B, H, rows, 1]`` for
    each row, which takes weight. See `attention`.
    """
    tokens = scores.shape[3]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)], dim=3)
    return torch.softmax(scores, dim=3)[..., :tokens]


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
    *_: object,
) -> Tensor:
    """Shape of `attention`."""
    return q.new_empty((*q.shape[:3], State.of(values, v_plan).tokens.shape[3]))


define(SCHEMA, attention, attention_fake)
