"""What a `PackedKV` does without decoding, op by op. Every result owns its storage."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpass._torch import is_traced, tree_leaves, written_arguments
from kvpass.cache import mixed
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.errors import CacheStateError
from kvpass.ops.append import row_ends
from kvpass.ops.pack import write_window
from kvpass.ops.unpack import read_packed

if TYPE_CHECKING:
    from kvpass.cache.packed import PackedKV

log = logging.getLogger(__name__)
aten = torch.ops.aten

# What a slice without an end has for one.
_SLICE_END = 2**63 - 1
HANDLERS: dict[Any, Callable[..., Any]] = {}
# Ops that had to decode a cache tensor outside compiled code, and how often.
DECODES: Counter[str] = Counter()
_PackedKV: type[PackedKV]


def register(cls: type[PackedKV]) -> None:
    """Called once by `kvpass.cache.packed`, which imports this file."""
    global _PackedKV
    _PackedKV = cls


def handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the native implementation of aten ``ops``; it may return NotImplemented to
    decode."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return decorate


def note_decode(op: str, handle: PackedKV, callers: int = 1) -> None:
    """Counts a decode outside compiled code; the first one warns, of the code that is so many calls
    above the caller."""
    if not DECODES:
        warnings.warn(
            f"{op} decoded a packed cache tensor {tuple(handle.shape)} to {handle.dtype}. "
            "kvpass warns once; kvpass.explain counts them all.",
            stacklevel=2 + callers,
        )
    DECODES[op] += 1
    log.debug("%s decoded %s", op, handle)


def write_refused(op: str, handle: PackedKV) -> CacheStateError:
    """The error for a write that would be lost: what an op sees is a decoded copy."""
    return CacheStateError(
        f"{op} would write into a packed cache tensor {tuple(handle.shape)}, which only a step of "
        "the model extends. Change a copy, x.decode(), or use a new cache."
    )


def check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises:
    CacheStateError: if ``func``, an operator that has to decode, writes to a packed tensor.
    """
    passed: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)
    for key in written_arguments(func) or ():
        for target in tree_leaves(passed.get(key)):
            if isinstance(target, _PackedKV):
                raise write_refused(str(func), target)


def token_dims(plan: TensorPlan) -> dict[str, int]:
    """The growing state tensors and the dimension along which each of them grows."""
    if plan.codec.identity:
        return {"codes": 2}
    dims = {"codes": 2}
    if not plan.codec.offline:
        dims["params"] = 2 if plan.codec.axis == "channel" else 3
    return {**dims, "outliers": 1} if plan.codec.outliers else dims


def _rebuilt(
    old: PackedKV, state: Sequence[Tensor], length: int | None = None, written: int | None = None
) -> PackedKV:
    """A handle on a new ``state``, as long as ``old`` unless told otherwise."""
    length = old.shape[2] if length is None else length
    written = old.written if written is None else written
    shaped = state[0] if old.plan.codec.identity else state[2]
    handle = _PackedKV(state, old.plan, length, shaped.dtype, written=written, order=old.order)
    handle.mark_dynamic()
    return handle


@handles(aten.detach.default, aten.alias.default)
def same(x: PackedKV) -> PackedKV:
    """Another handle on the same storage, of the same age."""
    handle = _PackedKV(x.state, x.plan, x.shape[2], x.dtype, written=x.written, order=x.order)
    handle._steps, handle._born = x._steps, x._born
    return handle


@handles(aten.clone.default)
def clone(x: PackedKV, memory_format: torch.memory_format | None = None) -> Any:
    """A copy of the storage."""
    if is_traced(x.ends):
        return NotImplemented
    x.check()
    return _rebuilt(x, [t.clone() for t in x.state])


@handles(aten._to_copy.default)
def to_copy(
    x: PackedKV,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    """Another device or dtype; codes, params and ends keep their types."""
    if is_traced(x.ends) or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    x.check()
    exact = {"codes"} if x.plan.codec.identity else {"window", "sinks", "kept"}
    exact |= {f"codes{i}" for i, codec in enumerate(x.plan.levels) if codec.identity}
    state = [
        getattr(x, name).to(
            device=device,
            dtype=dtype if name in exact else None,
            non_blocking=non_blocking,
            copy=True,
        )
        for name in x.plan.state_names
    ]
    return _rebuilt(x, state)


@handles(aten.index_select.default)
def index_select(x: PackedKV, dim: int, index: Tensor) -> Any:
    """Rows of the batch, as beam search reorders them."""
    if dim % 4 or is_traced(x.ends):
        return NotImplemented
    x.check()
    state = [t.index_select(0, index) for t in x.own]
    if x.plan.rope is not None:
        # All sequences of a batch may have the same cosines and sines.
        one = x.rotary.shape[0] == 1
        state.insert(-1, x.rotary.clone() if one else x.rotary.index_select(0, index))
    return _rebuilt(x, state)


@handles(aten.index.Tensor)
def index(x: PackedKV, indices: Sequence[Tensor | None]) -> Any:
    """Rows of the batch by an index or a bool mask."""
    first, *rest = indices
    if first is None or first.dim() != 1 or any(i is not None for i in rest):
        return NotImplemented
    # On the batch's own numbers torch checks the bounds, and resolves negative ones.
    return index_select(x, 0, torch.arange(x.shape[0], device=x.device)[first])


def getitem(x: PackedKV, key: Any) -> Any:
    """``x[..., :n, :]`` (a crop), what a sliding window leaves of it, and ``x[i:j]`` or ``x[rows]``
    along the batch; else NotImplemented.

    Taken at ``__getitem__``, not at ``aten.slice``: torch declares the latter's result a view,
    which would keep the whole of ``x`` alive.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if is_traced(x.ends) or len(dots) > 1 or any(k is None for k in keys):
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
    if first and (plan.keep is None or last - first < min(total, plan.keep)):
        return NotImplemented
    if plan.levels:
        cropped, longest = mixed.cropped(x, last)
        return _rebuilt(x, cropped, last, longest)
    state = [t.clone() for t in x.state]
    ends = state[-1]
    if not plan.codec.identity:
        packed, g = row_ends(ends)[-2], plan.codec.token_group
        sinks = min(plan.sinks, total)
        kept = min(packed, sinks + (total - sinks) // g * g)
        if kept < min(packed, total):
            group = read_packed(x.state, plan, kept, kept + g, x.dtype)
            write_window(state[2], kept, group[:, :, : total - kept])
        ends.clamp_(max=kept)
        if plan.kept:
            places = state[plan.state_names.index("places")]
            places.masked_fill_(places >= kept, -1)
    ends[:, -1] = total
    return _rebuilt(x, state, last - first, total)


@handles(aten.slice.Tensor)
def slice_traced(
    x: PackedKV, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """``x[:, :, -n:]`` while it is traced: a window slides."""
    whole = end is None or (isinstance(end, int) and end >= _SLICE_END)
    if not is_traced(x.ends) or dim % 4 != 2 or step != 1 or not whole:
        return NotImplemented
    if start is None or start >= 0:
        return NotImplemented
    if -start == x.plan.keep:
        # What the cache keeps: no guard on its length, so that one graph serves all of them.
        return _traced(x, torch.sym_min(x.shape[2], -start))
    # What attention reads must be seen to fit its mask.
    return _traced(x, -start if x.shape[2] >= -start else x.shape[2])


def _traced(x: PackedKV, tokens: int) -> PackedKV:
    return _PackedKV(x.state, x.plan, tokens, x.dtype, order=x.order)


@handles(aten.cat.default)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """A packed tensor followed by new tokens, or packed tensors of equal length along the batch."""
    first, *rest = tensors
    if not isinstance(first, _PackedKV):
        return NotImplemented
    if is_traced(first.ends):
        plain = not any(isinstance(t, _PackedKV) for t in rest)
        if first.plan.keep is None or not plain or dim % 4 != 2:
            return NotImplemented
        return _traced(first, first.shape[2] + sum(t.shape[2] for t in rest))
    if dim % 4 == 0:
        return _cat_batch(tensors)
    expected = (*first.shape[:2], first.shape[3])
    # Keys that come here have been turned by their rotary embedding.
    if (
        dim % 4 != 2
        or first.plan.rope is not None
        or any(
            isinstance(t, _PackedKV)
            or t.dim() != 4
            or (*t.shape[:2], t.shape[3]) != expected
            or t.dtype != first.dtype
            for t in rest
        )
    ):
        return NotImplemented
    first.check()
    result = clone(first)
    for new in rest:
        result = extend(result, new if first.order is None else first.order.store(new))
    return result


def extend(x: PackedKV, new: Tensor) -> PackedKV:
    """``x`` with ``new`` tokens, whose channels are in the order of the storage, in place."""
    x.reserve(new.shape[2])
    torch.ops.kvpass.append.default(x.appended, new, str(x.plan))
    return x.extended(new.shape[2])


def _cat_batch(tensors: Sequence[Tensor]) -> Any:
    """Rows join only if all of them have their boundaries at the same tokens, or each its own."""
    packed = [t for t in tensors if isinstance(t, _PackedKV)]
    first = packed[0]
    if len(packed) != len(tensors) or any(
        (t.plan, t.order) != (first.plan, first.order)
        or t.shape[1:] != first.shape[1:]
        or (not t.plan.levels and row_ends(t.ends) != row_ends(first.ends))
        or (t.plan.codec.offline and not torch.equal(t.params[:1], first.params[:1]))
        for t in packed
    ):
        return NotImplemented
    room = max(t.capacity for t in packed)
    for t in packed:
        t.check()
    if first.plan.levels:
        longest = max(t.written for t in packed)
        return _rebuilt(first, mixed.joined_batch(packed), written=longest)
    ring = 0 if first.plan.codec.identity else max(t.window.shape[2] for t in packed)
    grown = [_with_room(t, room, ring) for t in packed]
    state = [torch.cat(parts) for parts in zip(*(g.own for g in grown), strict=True)]
    if first.plan.rope is not None:
        room = max(t.rotary.shape[1] for t in packed)
        for g in grown:
            g.grow_rotary(room)
        state.insert(-1, torch.cat([g.rotary.expand(g.shape[0], -1, -1) for g in grown]))
    return _rebuilt(first, state)


def _with_room(x: PackedKV, room: int, ring: int) -> PackedKV:
    result: PackedKV = clone(x)
    result.grow(room)
    if x.plan.grows:
        result.grow_window(ring)
    return result


@handles(aten.zero_.default)
def zero_(x: PackedKV) -> PackedKV:
    """All tokens become zero, in place; those of a static cache become unwritten (its reset)."""
    x.check()
    if x.plan.room is not None:
        x.ends.zero_()
        x.written = 0
        return x
    if x.plan.codec.offline:
        raise CacheStateError(
            "A cache tensor with calibrated ranges cannot be set to zero in place. Use a new cache."
        )
    places = x.plan.place_names if x.plan.levels else ()
    for name in x.plan.own_names[:-1]:
        if name not in places:
            getattr(x, name).zero_()
    if x.plan.kept:
        x.places.fill_(-1)
    return x


@handles(aten.index_copy_.default)
def index_copy_(x: PackedKV, dim: int, index: Tensor, source: Tensor) -> Any:
    """New tokens behind the last ones of a static cache, in place."""
    if x.plan.room is None or dim % 4 != 2:
        return NotImplemented
    if is_traced(x.ends):
        return x
    x.check()
    new = source.shape[2]
    x.reserve(new)
    if index.tolist() != list(range(x.written, x.written + new)):
        raise CacheStateError(
            f"A static cache of {x.written} tokens is written at {index.tolist()}; packed, only "
            "the next positions can be written."
        )
    stored = source if x.order is None else x.order.store(source)
    torch.ops.kvpass.append.default(x.own, stored, str(x.plan))
    x.written += new
    return x
