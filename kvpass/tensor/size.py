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
    bits = sum(_bits_per_element(t) * t.numel() for t in tensors)
    bits += sum(_rotary_bits(t) for t in _rotary(tensors))
    return bits / max(sum(t.numel() for t in tensors), 1)


def size_alone(tensors: Sequence[Tensor]) -> tuple[int, float]:
    """`held_bytes` and `stored_bits` of one row of a batch if it were the only one: the cosines and
    sines that all rows share are there for one as well."""
    rows = tensors[0].shape[0]
    shared = [t for t in _rotary(tensors) if len(t.cos_sin) < rows]
    common, bits = sum(t.cos_sin.nbytes for t in shared), sum(_rotary_bits(t) for t in shared)
    alone = (rows - 1) * bits / max(sum(t.numel() for t in tensors), 1)
    return (held_bytes(tensors) - common) // rows + common, stored_bits(tensors) + alone


def _bits_per_element(tensor: Tensor) -> float:
    """Without what layers share."""
    if isinstance(tensor, PackedKV):
        return tensor.bits_per_element
    return 8.0 * tensor.dtype.itemsize


def _rotary(tensors: Sequence[Tensor]) -> list[PackedKV]:
    """For all cosines and sines, one of the tensors that share them."""
    packed = [t for t in tensors if isinstance(t, PackedKV) and t.plan.rope is not None]
    return list({id(t.cos_sin): t for t in packed}.values())


def _rotary_bits(tensor: PackedKV) -> float:
    """Bits of the cosines and sines of its tokens."""
    rows, capacity, width = tensor.cos_sin.shape
    return 8 * tensor.cos_sin.element_size() * rows * width * min(tensor.written, capacity)
