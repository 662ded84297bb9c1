"""What the cache tensors of a model hold together: what they share counts once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass._torch import storage_key
from kvpass.tensor.packed import PackedKV


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of all of them, spare room included."""
    parts: dict[int, int] = {}
    for tensor in tensors:
        for part in tensor.state if isinstance(tensor, PackedKV) else [tensor]:
            parts[storage_key(part)] = part.numel() * part.element_size()
    return sum(parts.values())


def stored_bits(tensors: Sequence[Tensor]) -> float:
    """Bits that store one element, everything but spare room; 0 if there is none."""
    bits, tables = 0.0, {}
    for tensor in tensors:
        if not isinstance(tensor, PackedKV):
            bits += 8 * tensor.dtype.itemsize * tensor.numel()
            continue
        bits += tensor.bits_per_element * tensor.numel()
        if tensor.plan.rope is not None:
            shared = tensor.cos_sin
            row = 8 * shared.shape[0] * shared.shape[2] * shared.element_size()
            tables[id(shared)] = row * min(tensor.written, shared.shape[1])
    return (bits + sum(tables.values())) / max(sum(t.numel() for t in tensors), 1)
