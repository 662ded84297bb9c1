"""The ops that rules write: functions on whole `PackedKV` tensors, without side effects.

They run as they stand, so that a rewritten graph can be executed and compared with the original.
The binding pass turns them into ``torch.ops.kvpass`` ops, which take a cache tensor's inner
tensors and extend them in place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kvpass.cocktail.placement import ChunkFormat, place
from kvpass.format.channels import channel_basis
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.parse import parse_plan
from kvpass.ops import attention as _attention  # noqa: F401  (registers the op)
from kvpass.ops import length as _length  # noqa: F401  (registers the op)
from kvpass.ops.basis import rotate
from kvpass.ops.basis import rotate_weight as _rotate_weight
from kvpass.ops.cos_sin import rotated
from kvpass.ops.library import op_of
from kvpass.tensor import native
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.sharded import kind_of


def append(
    past: PackedKV | None,
    new: Tensor,
    plan: str,
    whole: bool = False,
    basis: Tensor | None = None,
    ranges: Tensor | None = None,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
) -> PackedKV:
    """``new`` ``[B, H, n, D]`` after ``past``; a first prompt's state if ``past`` is None.

    A static cache's ``past`` is extended in place.

    Args:
        past: the tokens before.
        new: in ``basis``.
        plan: a printed `TensorPlan`.
        whole: all of a first prompt is kept although a window slides, since some of it may be taken
            back.
        basis: the order ``[H, D]`` or the rotation ``[H, D, D]`` of the channels of the result, and
            of ``past``.
        ranges: qparams ``[H, 1, D]`` of a first prompt's codec, if they are calibrated.
        cos_sin: cosines and sines of ``new``, which is not rotated by them yet, see
            `kvpass.format.rope.Rope`. They are kept beside it, if it is rotated when it is read.
        rope: how ``new`` is rotated by them before it is stored.
    """
    if cos_sin is not None and rope is not None:
        new, cos_sin = rotated(new, cos_sin, rope), None
    if past is None:
        p, tokens = parse_plan(plan), new.shape[2]
        stored = replace(p, window_size=None) if whole else p
        state = op_of(p, "pack")(new, str(stored), ranges)
        if cos_sin is not None:
            state.append(torch.ops.kvpass.pack_cos_sin.default(cos_sin, str(stored)))
        kept = None if basis is None else channel_basis(basis)
        return kind_of(p).of_prompt(state, p, tokens, new.dtype, kept, stored)
    if past.plan.room is not None:
        torch.ops.kvpass.append.default(past.own, new, plan)
        past.written += new.shape[2]
        return past
    copy = cast(PackedKV, past.clone())
    if cos_sin is not None:
        copy.reserve_cos_sin(cos_sin.shape[1], copy.shape[2] + cos_sin.shape[1])
        torch.ops.kvpass.append_cos_sin.default(copy.cos_sin, cos_sin, copy.segment_ends, plan)
    return native.extend(copy, new)


def attention(
    q: Tensor,
    keys: PackedKV,
    values: PackedKV,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Softmax attention of ``q`` ``[B, Hq, n, D]`` over packed keys and values, see
    `kvpass.ops.attention.attention`. The query comes in the basis of the keys' storage, the result
    in that of the values'."""
    return cast(
        Tensor,
        op_of(keys.plan, "attention")(
            q, keys.state, values.state, mask, scale, str(keys.plan), str(values.plan),
            sinks, causal, window, softcap,
        ),
    )  # fmt: skip


def reorder_chunks(
    past: PackedKV | None,
    new: Tensor,
    plan: str,
    whole: bool = False,
    basis: Tensor | None = None,
) -> PackedKV:
    """`append` of a prompt by a `ChunkedPlan`: ``new`` ``[B, H, n, D]`` in the order of the bits
    that `kvpass.cocktail.use` has set for its chunks; see `kvpass.ops.chunks`."""
    p = cast(ChunkedPlan, parse_plan(plan))
    pasts = [] if past is None else [cast(ChunkedKV, past.clone())]
    placed = place(pasts, ChunkFormat.of([p]), new.shape[0], new.shape[2], new.device)
    if pasts:
        op_of(p, "extend")(pasts[0].own, new, placed.scatter_index, plan)
        return placed.extended(pasts[0].extended(new.shape[2]))
    state = op_of(p, "reorder")(new, placed.scatter_index, plan)
    return placed.fresh(state, p, new.dtype, None if basis is None else channel_basis(basis))


def slide(packed: PackedKV) -> PackedKV:
    """The tokens that a sliding window leaves in the cache."""
    tokens = packed.plan.window_size
    assert tokens is not None
    return cast(PackedKV, packed[:, :, -tokens:])


def unpack(packed: PackedKV) -> Tensor:
    """The plain tensor ``[B, H, T, D]``."""
    return packed.decode()


def stored(packed: PackedKV) -> Tensor:
    """The plain tensor ``[B, H, T, D]``, its channels in the basis of the storage."""
    return packed.stored()


def length(packed: PackedKV) -> Tensor:
    """How many tokens there are, int32 without dimensions, on the device."""
    side_by_side = packed.plan.side_by_side
    return cast(Tensor, torch.ops.kvpass.length.default(packed.segment_ends, side_by_side))


def rotate_channels(x: Tensor, basis: Tensor) -> Tensor:
    """``x`` with its channels in another basis, see `kvpass.ops.basis.rotate`."""
    return rotate(x, basis)


def rotate_weight(weight: Tensor, basis: Tensor, dim: int) -> Tensor:
    """See `kvpass.ops.basis.rotate_weight`. Computed once, outside the graph."""
    return _rotate_weight(weight, basis, dim)


# fmt: off
LOGICAL = (
    append, attention, length, reorder_chunks, rotate_channels, rotate_weight, slide, stored,
    unpack,
)
# fmt: on
