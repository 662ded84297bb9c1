"""Ops that a `PackedKV` does without decoding. Every result owns its storage."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import is_traced
from kvpass.errors import CacheStateError
from kvpass.format.state import State
from kvpass.ops.library import op_of
from kvpass.tensor.branches import Branch, ends_of
from kvpass.tensor.copies import copied
from kvpass.tensor.dispatch import handles
from kvpass.tensor.fork import branched, shares_crop
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.rows import Rows

aten = torch.ops.aten

# What a slice without an end has for one.
_SLICE_END = 2**63 - 1


def rebuilt(
    old: PackedKV,
    state: Sequence[Tensor],
    length: int | None = None,
    written: int | None = None,
    rows: Rows | None = None,
) -> PackedKV:
    """A handle on a new ``state``, by default as long as ``old``, whose ``rows`` begin so."""
    length = old.shape[2] if length is None else length
    written = old.written if written is None else written
    dtype = State(state, old.plan).tokens.dtype
    handle = type(old)(state, old.plan, length, dtype, written=written, basis=old.basis)
    handle._line.rows = rows
    handle.mark_dynamic()
    return handle


@handles(Tensor.__deepcopy__)
def fork(x: PackedKV, memo: dict[int, Any]) -> PackedKV:
    """A copy that shares with ``x`` what neither of them replaces, see `kvpass.tensor.branches`."""
    x.check()
    forked = branched(x, memo)
    if forked is None:
        return rebuilt(x, [copy.deepcopy(tensor, memo) for tensor in x.state])
    return _branch(x, forked)


def _branch(
    x: PackedKV,
    forked: tuple[list[Tensor], Branch],
    length: int | None = None,
    total: int | None = None,
) -> PackedKV:
    state, branch = forked
    handle = rebuilt(x, state, length, total, x._line.rows)
    handle._line.branch = branch
    return handle


@handles(aten.detach.default, aten.alias.default)
def same(x: PackedKV) -> PackedKV:
    """Another handle on the same storage, of the same age."""
    if is_traced(x.segment_ends):
        return _traced(x, x.shape[2])
    handle = type(x)(x.state, x.plan, x.shape[2], x.dtype, written=x.written, basis=x.basis)
    handle._line, handle._born = x._line, x._born
    return handle


@handles(aten.clone.default)
def clone(x: PackedKV, memory_format: torch.memory_format | None = None) -> Any:
    """A copy of the storage."""
    if is_traced(x.segment_ends):
        return NotImplemented
    x.check()
    return rebuilt(x, [t.clone() for t in x.state])


@handles(aten._to_copy.default)
def to_copy(
    x: PackedKV,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    """Another device or dtype, which only exact tokens follow."""
    if is_traced(x.segment_ends) or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    x.check()
    dtypes = [dtype if field.exact else None for field in x.plan.layout.fields]
    moved = partial(torch.Tensor.to, device=device, non_blocking=non_blocking, copy=True)
    return rebuilt(x, [moved(t, dtype=d) for t, d in zip(x.state, dtypes, strict=True)])


def _of_shape(op: Any, x: PackedKV, *args: Any, **kwargs: Any) -> Any:
    """What depends on the shape and the dtype alone, without a token."""
    if is_traced(x.segment_ends):
        return NotImplemented
    return op(x.segment_ends.new_empty(1, dtype=x.dtype).expand(x.shape), *args, **kwargs)


for _op in (aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like,
            aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full):  # fmt: skip
    handles(_op.default)(partial(_of_shape, _op.default))


@handles(aten.index_select.default)
def index_select(x: PackedKV, dim: int, index: Tensor) -> Any:
    """Rows of the batch, as beam search reorders them."""
    if dim % 4 or is_traced(x.segment_ends):
        return NotImplemented
    x.check()
    stored = ends_of(x.plan, x.segment_ends).stored
    state, rows = copied(x, x.written, x._line.rows, index, stored)
    return rebuilt(x, state, rows=rows)


@handles(aten.index.Tensor)
def index(x: PackedKV, indices: Sequence[Tensor | None]) -> Any:
    """Rows of the batch by an index or a bool mask."""
    first, *rest = indices
    if first is None or first.dim() != 1 or any(i is not None for i in rest):
        return NotImplemented
    # On the batch's own numbers torch checks the bounds, and resolves negative ones.
    return index_select(x, 0, torch.arange(x.shape[0], device=x.device)[first])


@handles(Tensor.__getitem__)
def getitem(x: PackedKV, key: Any) -> Any:
    """``x[..., :n, :]`` (a crop), what a sliding window leaves of it, and ``x[i:j]`` or ``x[rows]``
    along the batch; else NotImplemented.

    Taken here, not at ``aten.slice``: torch declares the latter's result a view, which would keep
    the whole of ``x`` alive.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if is_traced(x.segment_ends) or len(dots) > 1 or any(k is None for k in keys):
        return NotImplemented
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = [slice(None)] * (4 - len(keys) + len(dots))
    cut = [d for d, k in enumerate(keys) if not (isinstance(k, slice) and k == slice(None))]
    if not cut:
        return same(x)
    if len(cut) > 1 or cut[0] not in (0, 2):
        return NotImplemented
    dim, part = cut[0], keys[cut[0]]
    if isinstance(part, Tensor) and dim == 0:
        return index(x, [part])
    if not isinstance(part, slice):
        return NotImplemented
    first, last, stride = part.indices(x.shape[dim])
    if stride != 1:
        return NotImplemented
    if dim == 0:
        return index_select(x, 0, torch.arange(first, max(last, first), device=x.device))
    return crop(x, first, max(first, last))


def crop(x: PackedKV, first: int, last: int) -> Any:
    """Tokens ``first ... last``; tokens at the front are only dropped where a window slides.

    A group that is cut through at its end is decoded into the exact window.
    """
    x.check()
    plan, total = x.plan, x.written - (x.shape[2] - last)
    if plan.room is not None:
        return NotImplemented
    # A step sees the last tokens as the plan says: the logical tensor may not be shorter.
    if first and (plan.window_size is None or last - first < min(total, plan.window_size)):
        return NotImplemented
    if shares_crop(x, total) and (forked := branched(x, {}, total)) is not None:
        return _branch(x, forked, last - first, total)
    state, written, rows = x.cropped(last, total)
    return rebuilt(x, state.tensors, last - first, written, rows)


@handles(aten.slice.Tensor)
def slice_traced(
    x: PackedKV, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """``x[:, :, -n:]`` while it is traced: a window slides."""
    whole = end is None or (isinstance(end, int) and end >= _SLICE_END)
    if not is_traced(x.segment_ends) or dim % 4 != 2 or step != 1 or not whole:
        return NotImplemented
    if start is None or start >= 0:
        return NotImplemented
    if -start == x.plan.window_size:
        # What the cache keeps: no guard on its length, so that one graph serves all of them.
        return _traced(x, torch.sym_min(x.shape[2], -start))
    # What attention reads must be seen to fit its mask.
    return _traced(x, -start if x.shape[2] >= -start else x.shape[2])


def _traced(x: PackedKV, tokens: int) -> PackedKV:
    size = (*x.shape[:2], tokens, x.shape[3])
    return type(x).__tensor_unflatten__({"segment_ends": x.segment_ends}, x.meta, size, None)


@handles(aten.cat.default)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A packed tensor followed by new tokens, or packed tensors of equal length along the batch."""
    first, *rest = tensors
    if not isinstance(first, PackedKV):
        return NotImplemented
    if is_traced(first.segment_ends):
        plain = not any(isinstance(t, PackedKV) for t in rest)
        if first.plan.window_size is None or not plain or dim % 4 != 2:
            return NotImplemented
        return _traced(first, first.shape[2] + sum(t.shape[2] for t in rest))
    if dim % 4 == 0:
        return _cat_batch(tensors)
    # Keys that come here have been rotated by their rotary embedding.
    if dim % 4 != 2 or first.plan.rope is not None:
        return NotImplemented
    shape = (*first.shape[:2], first.shape[3])
    for new in rest:
        fits = new.dim() == 4 and (*new.shape[:2], new.shape[3]) == shape
        if isinstance(new, PackedKV) or not fits or new.dtype != first.dtype:
            return NotImplemented
    first.check()
    result = clone(first)
    for new in rest:
        result = extend(result, new if first.basis is None else first.basis.store(new))
    return result


def extend(x: PackedKV, new: Tensor) -> PackedKV:
    """``x`` with ``new`` tokens, whose channels are in the order of the storage, in place."""
    x.reserve(new.shape[2])
    op_of(x.plan, "append")(x.own, new, str(x.plan))
    return x.extended(new.shape[2])


def _cat_batch(tensors: Sequence[Tensor]) -> Any:
    packed = [t for t in tensors if isinstance(t, PackedKV)]
    first = packed[0]
    kinds = {(t.plan, t.basis, t.shape[1:]) for t in packed}
    if len(packed) != len(tensors) or len(kinds) > 1:
        return NotImplemented
    for t in packed:
        t.check()
    if not first.joins(packed):
        return NotImplemented
    copies = [t.widened(packed) for t in packed]
    state = []
    for parts in zip(*(c.state for c in copies), strict=True):
        rows = zip(parts, copies, strict=True)
        state.append(torch.cat([part.expand(len(c), *part.shape[1:]) for part, c in rows]))
    return rebuilt(first, state, written=max(t.written for t in packed))


@handles(aten.zero_.default)
def zero_(x: PackedKV) -> PackedKV:
    """All tokens become zero, in place; those of a static cache become unwritten (its reset)."""
    x.check()
    if x.plan.room is not None:
        x.segment_ends.zero_()
        x.written = 0
        return x
    if any(field.constant for field in x.plan.layout.own):
        raise CacheStateError(
            "A cache tensor with calibrated ranges cannot be set to zero in place. Use a new cache."
        )
    for branch in x.branches:
        branch.trunk.leave(branch)
    if (rows := x._line.rows) is not None:
        x._line.rows = replace(rows, common=0, exact=range(sys.maxsize))
    for field in x.plan.layout.own:
        if field.name != "segment_ends":
            getattr(x, field.name).fill_(field.fill or 0)
    return x


@handles(aten.index_copy_.default)
def index_copy_(x: PackedKV, dim: int, index: Tensor, source: Tensor) -> Any:
    """New tokens behind the last ones of a static cache, in place."""
    if x.plan.room is None or dim % 4 != 2:
        return NotImplemented
    if is_traced(x.segment_ends):
        return x
    x.check()
    new = source.shape[2]
    x.reserve(new)
    if index.tolist() != list(range(x.written, x.written + new)):
        raise CacheStateError(
            f"A static cache of {x.written} tokens is written at {index.tolist()}; packed, only "
            "the next positions can be written."
        )
    stored = source if x.basis is None else x.basis.store(source)
    torch.ops.kvpass.append.default(x.own, stored, str(x.plan))
    x.written += new
    return x
