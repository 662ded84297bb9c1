"""The attention of many requests at once over packed pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import CacheStateError, OptionError
from kvpass.format.tensor_plan import TensorPlan
from kvpass.inner import provider
from kvpass.ops.attention import (
    AttentionArguments,
    attention_weights,
    dense_attention,
    grouped_query,
    mask_rows,
)
from kvpass.ops.pages import Pages, Request
from kvpass.serving.pages import TensorPages

# Queries that are attended with at a time: scores take this many rows of a head.
QUERIES = 128
# Who computes an op of pages, by the op and what else decides it.
_TARGETS: dict[tuple[Any, ...], Callable[..., None]] = {}


@dataclass(frozen=True)
class Readable:
    """The keys or the values of a request in a step.

    Attributes:
        pages: where they are; those that are due have been packed.
        plan: how.
        window: positions that a query sees, its own counted; 0: all.
    """

    pages: Pages
    plan: TensorPlan
    request: Request
    window: int = 0

    def first_seen(self, position: int) -> int:
        """The first position that the query at ``position`` sees."""
        return max(position + 1 - self.window, 0) if self.window else 0

    @cached_property
    def start(self) -> int:
        """What the first query sees begins in the page that begins here."""
        page = self.pages.exact.shape[2]
        return self.first_seen(self.request.past) // page * page

    def packed_before(self, tokens: int) -> int:
        """See `RetentionPolicy.packed_before`."""
        return self.plan.retention.packed_before(tokens)

    @cached_property
    def packed(self) -> Tensor:
        """All tokens from `start` on that are packed for the last query, sinks as they are: ``[1,
        H, n, D]``."""
        end = self.packed_before(self.request.total - 1)
        return self.pages.upto(self.plan, self.request, end, end, self.start)

    @cached_property
    def tail(self) -> Tensor:
        """All tokens that are exact for the first query, but for sinks: ``[1, H, n, D]``."""
        start = self.packed_before(self.request.past)
        return self.pages.exact_tokens(self.request, start, self.request.total)

    def between(self, first: int, packed: int, end: int) -> Tensor:
        """Tokens from position ``first`` up to ``end``, those before ``packed`` packed."""
        start = self.packed_before(self.request.past)
        tail = self.tail[:, :, packed - start : end - start]
        return torch.cat([self.packed[:, :, first - self.start : packed - self.start], tail], dim=2)


def attend(q: Tensor, keys: Readable, values: Readable, a: AttentionArguments) -> Tensor:
    """Attention of a request's queries ``[1, Hq, n, D]``. Each reads as packed what is packed when
    its token has a step of its own.

    Args:
        a: scale, softcap, window and sinks.
    """
    out, past = [], keys.request.past
    for first in range(past, past + q.shape[2], QUERIES):
        queries = q[:, :, first - past : first - past + QUERIES]
        end = first + queries.shape[2]
        ends = [(x.packed_before(first), x.packed_before(end - 1)) for x in (keys, values)]
        if all(low == high for low, high in ends):
            seen = keys.first_seen(first)
            k, v = (
                x.between(seen, low, end) for x, (low, _) in zip((keys, values), ends, strict=True)
            )
            out.append(dense_attention(a._replace(q=queries, causal=True), k, v))
        else:
            out.append(_attend_both(queries, keys, values, first, a))
    return torch.cat(out, dim=2)


def _attend_both(
    q: Tensor, keys: Readable, values: Readable, first: int, a: AttentionArguments
) -> Tensor:
    """`attend` where some tokens are packed for some queries and exact for others: both forms are
    read, and each query takes its own."""
    heads, n = q.shape[1:3]
    kv_heads, start, end = keys.pages.new.shape[1], keys.first_seen(first), first + n
    bounded = a._replace(q=q, causal=True)
    rows, seen, sinks = grouped_query(bounded, kv_heads, end - start)
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = rows.to(wide)

    def taken_packed(x: Readable) -> tuple[Tensor, slice, Tensor]:
        """The tokens that are in both forms, packed, and where; and which rows read them so."""
        low, high = x.packed_before(first), x.packed_before(end - 1)
        ends = torch.tensor([x.packed_before(i) for i in range(first, end)], device=q.device)
        older = torch.arange(low, high, device=q.device) < ends.unsqueeze(1)
        rows_older = mask_rows(older[None, None], kv_heads, heads // kv_heads, n)
        return x.between(low, high, high), slice(low - start, high - start), rows_older

    packed, both, older = taken_packed(keys)
    k = keys.between(start, start + both.start, end)
    scores = rows @ k.to(wide).transpose(2, 3) * a.scale
    of_packed = rows @ packed.to(wide).transpose(2, 3) * a.scale
    scores[..., both] = torch.where(older, of_packed, scores[..., both])
    weights = attention_weights(scores, seen, a.softcap, sinks)
    packed, both, older = taken_packed(values)
    of_packed = weights[..., both] * older
    weights[..., both] = weights[..., both] * ~older
    out = weights @ values.between(start, start + both.start, end).to(wide)
    out += of_packed @ packed.to(wide)
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
        s_aux: see `AttentionArguments`, ``sinks``.

    Returns:
        ``[1, n, Hq, D]``, and no weights.
    """
    if cache is None:
        raise CacheStateError(
            "The model is being served: its attention takes requests of continuous batching only."
        )
    if key.shape[3] != value.shape[3]:
        raise OptionError(
            f"The attention of {type(module).__name__} is not supported in packed pages; allowed: "
            "keys and values of the same width."
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    allocator, batch = cache.layer_to_allocator[module.layer_idx], cache.batch_of(module.layer_idx)
    pages, layer = allocator.pages, allocator.layer_indices.index(module.layer_idx)
    sides, heads, shape = (pages.keys[layer], pages.values[layer]), key.shape[1], query.shape
    query = _in_basis(sides[0], query.reshape(1, heads, -1, shape[3])).view(shape)
    new = [_in_basis(side, x) for side, x in zip(sides, (key, value), strict=True)]
    exact = allocator.exact.tokens[layer]
    keys, values = tensors = [Pages(side.stored, exact[i], new[i]) for i, side in enumerate(sides)]
    plans = sides[0].printed, sides[1].printed
    step = list(batch.step)
    for x, plan in zip(tensors, plans, strict=True):
        _run("append_pages", (plan, x), x.tensors, step, plan)
    out = query.new_empty((shape[2], shape[1], shape[3]))
    if len(batch.step.single):
        _run(
            "attention_pages", (*plans, keys, shape[1], pages.window > 0, s_aux is None),
            out, query, keys.tensors, values.tensors, step, scale, *plans, softcap or 0.0,
            pages.window, s_aux,
        )  # fmt: skip
    a = AttentionArguments(
        query, [], [], None, scale, *plans, s_aux, window=pages.window, softcap=softcap or 0.0
    )
    for request in batch.long:
        of_request = slice(request.first, request.first + request.total - request.past)
        k, v = (
            Readable(x, side.plan, request, pages.window)
            for x, side in zip(tensors, sides, strict=True)
        )
        out[of_request] = attend(query[:, :, of_request], k, v, a)[0].transpose(0, 1)
    # All have read by now: a page may have been taken from one request for another.
    for x in tensors:
        batch.keep(x.exact, x.new)
    basis = sides[1].basis
    if basis is not None:
        out = basis.restore(out.unflatten(1, (heads, -1))).flatten(1, 2)
    return out.unsqueeze(0), None


def _in_basis(side: TensorPages, x: Tensor) -> Tensor:
    """Tokens, or queries of each KV head, ``[1, H, n, D]`` in the basis of the pages."""
    return x if side.basis is None else side.basis.store(x)


def _run(op: str, made_for: tuple[Any, ...], *args: Any) -> None:
    """Runs an op of pages by whoever does it best, as in a compiled graph. ``made_for``: what, with
    the op, decides that: plans, pages and numbers."""
    key: tuple[Any, ...] = (op,)
    for x in made_for:
        key += x.kind if isinstance(x, Pages) else (x,)
    if key not in _TARGETS:
        _TARGETS[key], _ = provider(op, *args)
    _TARGETS[key](*args)
