"""The attention of many requests at once over packed pages, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass.backend import provider
from kvpass.errors import CacheStateError, OptionError
from kvpass.ops.attention import (
    AttentionArguments,
    attention_weights,
    dense_attention,
    mask_rows,
)
from kvpass.serving.stored import Readable, StoredTensor

# Queries that are attended with at a time: scores take this many rows of a head.
QUERIES = 128
# What computes ``kvpass::attention`` of one token, by plans, shape, dtype and device.
_TARGETS: dict[tuple[Any, ...], Callable[..., Tensor]] = {}


def attend(q: Tensor, keys: Readable, values: Readable, past: int, a: AttentionArguments) -> Tensor:
    """Attention of ``q`` ``[1, Hq, n, D]`` at positions ``past ...``. Each query reads as packed
    what is packed when its token has a step of its own.

    Args:
        a: scale and softcap.
    """
    out = []
    for first in range(past, past + q.shape[2], QUERIES):
        queries = q[:, :, first - past : first - past + QUERIES]
        end = first + queries.shape[2]
        ends = [(x.packed_before(first), x.packed_before(end - 1)) for x in (keys, values)]
        if all(low == high for low, high in ends):
            if queries.shape[2] == 1 and keys.packs and values.packs:
                out.append(_attend_one(queries, keys, values, a))
                continue
            k, v = (x.upto(low, end) for x, (low, _) in zip((keys, values), ends, strict=True))
            out.append(dense_attention(a._replace(q=queries, causal=True), k, v))
        else:
            out.append(_attend_both(queries, keys, values, first, a))
    return torch.cat(out, dim=2)


def _attend_one(q: Tensor, keys: Readable, values: Readable, a: AttentionArguments) -> Tensor:
    """`attend` of one token ``[1, Hq, 1, D]``: ``kvpass::attention`` by whoever computes it best,
    as in a compiled graph."""
    shape, heads = q.shape, keys.tail.shape[1]
    if keys.pages.basis is not None:
        q = keys.pages.basis.store(q.reshape(1, heads, -1, shape[3])).reshape(shape)
    a = a._replace(q=q, keys=keys.state(), values=values.state())
    key = (a.k_plan, a.v_plan, heads, *shape, q.dtype, q.device)
    if key not in _TARGETS:
        _TARGETS[key], _ = provider("attention", *a)
    out: Tensor = _TARGETS[key](*a)
    if values.pages.basis is not None:
        out = values.pages.basis.restore(out.reshape(1, heads, -1, shape[3])).reshape(shape)
    return out


def _attend_both(
    q: Tensor, keys: Readable, values: Readable, first: int, a: AttentionArguments
) -> Tensor:
    """`attend` where some tokens are packed for some queries and exact for others: both forms are
    read, and each query takes its own."""
    _, heads, n, d = q.shape
    kv_heads, end, wide = keys.tail.shape[1], first + n, torch.promote_types(q.dtype, torch.float32)
    groups = heads // kv_heads
    rows = q.reshape(1, kv_heads, groups * n, d).to(wide)

    def taken_packed(x: Readable) -> tuple[slice, Tensor]:
        """The tokens that are in both forms, and which rows read them packed."""
        low, high = x.packed_before(first), x.packed_before(end - 1)
        ends = torch.tensor([x.packed_before(i) for i in range(first, end)], device=q.device)
        older = torch.arange(low, high, device=q.device) < ends.unsqueeze(1)
        return slice(low, high), mask_rows(older[None, None], kv_heads, groups, n)

    both, older = taken_packed(keys)
    scores = rows @ keys.upto(both.start, end).to(wide).transpose(2, 3) * a.scale
    packed = rows @ keys.packed[:, :, both].to(wide).transpose(2, 3) * a.scale
    scores[..., both] = torch.where(older, packed, scores[..., both])
    key, query = torch.arange(end, device=q.device), torch.arange(first, end, device=q.device)
    seen = mask_rows((key <= query.unsqueeze(1))[None, None], kv_heads, groups, n)
    weights = attention_weights(scores, seen, a.softcap, None)
    both, older = taken_packed(values)
    of_packed = weights[..., both] * older
    weights[..., both] = weights[..., both] * ~older
    out = weights @ values.upto(both.start, end).to(wide)
    out += of_packed @ values.packed[:, :, both].to(wide)
    return out.to(q.dtype).reshape(1, heads, n, out.shape[3])


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cache: Any = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers for a `kvpass.serving.cache.PackedPagedCache`.

    Args:
        module: the attention, with its ``layer_idx``.
        query, key, value: the tokens of all requests of a batch one behind the other: ``[1, Hq, n,
            D]``, ``[1, H, n, D]`` and ``[1, H, n, D]``.
        attention_mask: none is made.
        scaling: multiplies the scores; None: one by the root of ``D``.
        cache: the cache.
        softcap: see `AttentionArguments`.
        s_aux: scores of attention sinks, which are not supported.

    Returns:
        ``[1, n, Hq, D]``, and no weights.
    """
    if cache is None:
        raise CacheStateError(
            "The model is being served: its attention takes requests of continuous batching only."
        )
    if s_aux is not None or key.shape[3] != value.shape[3]:
        raise OptionError(
            f"The attention of {type(module).__name__} is not supported in packed pages; allowed: "
            "keys and values of the same width, without attention sinks of the model."
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    pages, exact, layer = cache.allocator.pages, cache.allocator.exact, module.layer_idx
    k, v = (
        StoredTensor(p[layer], exact, layer, i) for i, p in enumerate((pages.keys, pages.values))
    )
    a = AttentionArguments(
        query, [], [], None, scale, k.pages.printed, v.pages.printed, softcap=softcap or 0.0
    )
    # All are read before any is written: a page may have been taken from one request for another.
    before = [(step, k.before(step), v.before(step)) for step in cache.steps]
    out, start = [], 0
    for step, old_keys, old_values in before:
        new = slice(start, start + step.total - step.past)
        keys = k.append(step, old_keys, key[:, :, new])
        values = v.append(step, old_values, value[:, :, new])
        out.append(attend(query[:, :, new], keys, values, step.past, a))
        start = new.stop
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None
