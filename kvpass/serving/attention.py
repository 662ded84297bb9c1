"""The attention of many requests at once over packed pages, one request at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.errors import CacheStateError, OptionError
from kvpass.ops.attention import (
    AttentionArguments,
    attention_weights,
    dense_attention,
    mask_rows,
)
from kvpass.serving.allocator import Step
from kvpass.serving.exact import ExactPages
from kvpass.serving.pages import TensorPages

# Queries that are attended with at a time: scores take this many rows of a head.
QUERIES = 128


class Exact(NamedTuple):
    """The exact tokens of a request before a step: sinks ``[1, H, s, D]``, if others are packed
    behind them, and the last ones ``[1, H, n, D]``, the first of which is at position ``start``."""

    sinks: Tensor
    tail: Tensor
    start: int


class Readable(NamedTuple):
    """The keys or the values of a request in a step, in both forms.

    Attributes:
        pages: how they are stored.
        packed: ``[1, H, P, D]``, decoded; sinks as they are.
        tail: exact tokens ``[1, H, n, D]`` from position ``start`` on.
    """

    pages: TensorPages
    packed: Tensor
    tail: Tensor
    start: int

    def packed_before(self, tokens: int) -> int:
        """See `RetentionPolicy.packed_before`."""
        return self.pages.plan.retention.packed_before(tokens)

    def upto(self, packed: int, end: int) -> Tensor:
        """Tokens up to position ``end``, the first ``packed`` of them packed."""
        tail = self.tail[:, :, packed - self.start : end - self.start]
        return torch.cat([self.packed[:, :, :packed], tail], dim=2)


def read_exact(
    pages: TensorPages, exact: ExactPages, at: tuple[int, int], step: Step, page_size: int
) -> Exact:
    """The exact tokens before a ``step`` of keys or values, which ``at`` says: layer and kind."""
    start = pages.plan.retention.packed_before(step.past - 1)
    found = exact.read(*at, step.exact)
    sinks = found[:, :, : pages.plan.sinks if start else 0]
    # Behind the pages of sinks.
    behind = found.shape[2] - (-(-step.past // page_size) - step.first) * page_size
    first = behind + start - step.first * page_size
    return Exact(sinks, found[:, :, first : behind + step.past - step.first * page_size], start)


def extended(
    pages: TensorPages, exact: ExactPages, at: tuple[int, int], step: Step, old: Exact, new: Tensor
) -> Readable:
    """Appends ``new`` ``[1, H, n, D]``: packs what is due, and keeps the others exact."""
    start, sinks = old.start, pages.plan.sinks
    end = pages.plan.retention.packed_before(step.total - 1)
    tail = torch.cat([old.tail, new], dim=2)
    first = max(start, sinks)
    if end > first:
        pages.write(step.blocks, first, tail[:, :, first - start : end - start])
    for page, slot, begin, stop in step.kept:
        exact.write(*at, (page, slot), new[:, :, begin - step.past : stop - step.past])
    packed = pages.read(step.blocks, end, new.dtype)
    if end:
        packed[:, :, :sinks] = old.sinks if start else tail[:, :, :sinks]
    return Readable(pages, packed, tail, start)


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
            k, v = (x.upto(low, end) for x, (low, _) in zip((keys, values), ends, strict=True))
            one = queries.shape[2] == 1
            out.append(dense_attention(a._replace(q=queries, causal=not one), k, v))
        else:
            out.append(_attend_both(queries, keys, values, first, a))
    return torch.cat(out, dim=2)


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
    a = AttentionArguments(query, [], [], None, scale, "", "", softcap=softcap or 0.0)
    allocator, layer, steps = cache.allocator, module.layer_idx, cache.steps
    exact, page_size = allocator.exact, allocator.tokens_per_page
    stored = [
        (p[layer], kind) for kind, p in enumerate((allocator.pages.keys, allocator.pages.values))
    ]
    # All are read before any is written: a page may have been taken from one request for another.
    old = [[read_exact(p, exact, (layer, k), step, page_size) for p, k in stored] for step in steps]
    out, start = [], 0
    for step, exacts in zip(steps, old, strict=True):
        new = slice(start, start := start + step.total - step.past)
        keys, values = (
            extended(pages, exact, (layer, kind), step, before, x[:, :, new])
            for (pages, kind), before, x in zip(stored, exacts, (key, value), strict=True)
        )
        out.append(attend(query[:, :, new], keys, values, step.past, a))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None
