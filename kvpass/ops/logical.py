"""The ops that rules write: functions on whole `PackedKV` tensors, without side effects.

They run as they stand, so that a rewritten graph can be executed and compared with the original.
The binding pass turns them into ``torch.ops.kvpass`` ops, which take a cache tensor's inner
tensors and extend them in place.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvpass.cache.packed import PackedKV
from kvpass.cache.residency import TensorPlan
from kvpass.ops import attention as _attention  # noqa: F401  (registers the op)


def append(past: PackedKV | None, new: Tensor, plan: str) -> PackedKV:
    """``new`` ``[B, H, n, D]`` after ``past``; a first prompt's state if ``past`` is None."""
    if past is None:
        state = torch.ops.kvpass.pack.default(new, plan)
        packed = PackedKV(state, TensorPlan.parse(plan), new.shape[2], new.dtype)
        packed.mark_dynamic()
        return packed
    return cast(PackedKV, torch.cat([past, new], dim=2))


def attention(
    q: Tensor, keys: PackedKV, values: PackedKV, mask: Tensor | None, scale: float
) -> Tensor:
    """Softmax attention of ``q`` ``[B, Hq, n, D]`` over packed keys and values."""
    out: Tensor = torch.ops.kvpass.attention.default(
        q, keys.state, values.state, mask, scale, str(keys.plan), str(values.plan)
    )
    return out


def unpack(packed: PackedKV) -> Tensor:
    """The plain tensor ``[B, H, T, D]``."""
    return packed.decode()


LOGICAL = (append, attention, unpack)
