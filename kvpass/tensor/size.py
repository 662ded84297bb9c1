"""Sizes of all cache tensors of a model together: tensors that they share count once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass._torch import storage_key
from kvpass.tensor.packed import PackedKV


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of all of them, spare room included; what layers, branches, or rows of a batch share
    counts once."""
    found: dict[object, int] = {}
    for t in tensors:
        found |= t.held if isinstance(t, PackedKV) else {storage_key(t): t.nbytes}
    return sum(found.values())


def stored_bits(tensors: Sequence[Tensor]) -> float:
    """Bits that store one element, everything but spare room; 0 if there is none."""
    bits, shared = 0.0, {}
    for tensor in tensors:
        if not isinstance(tensor, PackedKV):
            bits += 8 * tensor.dtype.itemsize * tensor.numel()
            continue
        bits += tensor.bits_per_element * tensor.numel()
        if tensor.plan.rope is not None:
            cos_sin = tensor.cos_sin
            token = 8 * cos_sin.shape[0] * cos_sin.shape[2] * cos_sin.element_size()
            shared[id(cos_sin)] = token * min(tensor.written, cos_sin.shape[1])
    return (bits + sum(shared.values())) / max(sum(t.numel() for t in tensors), 1)
