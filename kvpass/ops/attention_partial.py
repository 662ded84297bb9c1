"""``kvpass::attention_partial``: attention to some tokens; `merge` joins it with that to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.ops.attention import (
    ATTENTION_ARGUMENTS,
    AttentionArguments,
    attention_scores,
    decoded,
    grouped_query,
)
from kvpass.ops.library import define


def attention_partial(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::attention_partial``.

    Args:
        args: see `AttentionArguments`.

    Returns:
        float32 ``[B, Hq, n, Dv + 1]``: what ``kvpass::attention`` gives, and the logarithm of the
        sum of the exponentials of the scores behind it. Of no token these are 0 and -inf.
    """
    a = AttentionArguments(*args, **kwargs)
    return partial_attention(a, *decoded(a))


def partial_attention(a: AttentionArguments, k: Tensor, v: Tensor) -> Tensor:
    """`attention_partial` of plain keys and values ``[B, H, T, D]``."""
    b, heads, n, _ = a.q.shape
    q, mask, sinks = grouped_query(a, *k.shape[1:3])
    scores = attention_scores(q.float() @ k.float().transpose(2, 3) * a.scale, mask, a.softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)], dim=3)
    total = torch.logsumexp(scores, dim=3, keepdim=True)
    weights = torch.exp(scores - total.clamp(min=torch.finfo(torch.float32).min))
    out = torch.cat([weights[..., : k.shape[2]] @ v.float(), total], dim=3)
    return out.reshape(b, heads, n, v.shape[3] + 1)


def attention_partial_fake(*args: Any, **kwargs: Any) -> Tensor:
    """Shape of `attention_partial`."""
    a = AttentionArguments(*args, **kwargs)
    shape = partial_shape(a.q.shape, a.states[1].tokens.shape[3])
    return a.q.new_empty(shape, dtype=torch.float32)


def partial_shape(q: Sequence[int], channels: int) -> tuple[int, int, int, int]:
    """The shape of `attention_partial`, where queries have the shape ``q`` ``[B, Hq, n, D]`` and
    values ``channels``."""
    return (q[0], q[1], q[2], channels + 1)


def merge(partials: Tensor, parts: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Attention to all tokens from ``parts`` partial ones, one behind the other along the batch.

    Args:
        partials: ``[parts * B, Hq, n, Dv + 1]``, see `attention_partial`; further channels are not
            looked at.
        parts: their number; together they have every token once.
        channels: ``Dv``.
        dtype: of the result.

    Returns:
        ``[B, Hq, n, Dv]``; zero where no token is seen.
    """
    every = partials.unflatten(0, (parts, partials.shape[0] // parts))
    out, lse = every[..., :channels], every[..., channels : channels + 1]
    # No part of a row may see a token: the lowest number instead of -inf makes no NaN of it.
    top = lse.amax(0, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(lse - top)
    total = weights.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    merged: Tensor = (weights * out).sum(0) / total
    return merged.to(dtype)


define("attention_partial" + ATTENTION_ARGUMENTS, attention_partial, attention_partial_fake)
