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

from kvpass.cache.packed import PackedKV
from kvpass.cache.residency import TensorPlan
from kvpass.ops import attention as _attention  # noqa: F401  (registers the op)


def append(past: PackedKV | None, new: Tensor, plan: str, whole: bool = False) -> PackedKV:
    """``new`` ``[B, H, n, D]`` after ``past``; a first prompt's state if ``past`` is None.

    A static cache's ``past`` is extended in place.

    ``whole``: all of a first prompt is kept although a window slides, since some of it may be
    taken back.
    """
    if past is None:
        p, tokens = TensorPlan.parse(plan), new.shape[2]
        stored = replace(p, keep=None) if whole else p
        state = torch.ops.kvpass.pack.default(new, str(stored))
        written = tokens - stored.skipped(tokens)
        packed = PackedKV(state, p, stored.logical(tokens), new.dtype, written=written)
        packed.mark_dynamic()
        return packed
    if past.plan.room is not None:
        torch.ops.kvpass.append.default(past.state, new, plan)
        past.written += new.shape[2]
        return past
    return cast(PackedKV, torch.cat([past, new], dim=2))


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
    `kvpass.ops.attention.attention`."""
    plans = (str(keys.plan), str(values.plan))
    variant = (sinks, causal, window, softcap)
    out: Tensor = torch.ops.kvpass.attention.default(
        q, keys.state, values.state, mask, scale, *plans, *variant
    )
    return out


def slide(packed: PackedKV) -> PackedKV:
    """The tokens that a sliding window leaves in the cache."""
    keep = packed.plan.keep
    assert keep is not None
    return cast(PackedKV, packed[:, :, -keep:])


def unpack(packed: PackedKV) -> Tensor:
    """The plain tensor ``[B, H, T, D]``."""
    return packed.decode()


LOGICAL = (append, attention, slide, unpack)
