"""Rings: tensors of tokens in which token ``t`` is at slot ``t % slots``."""

from __future__ import annotations

import torch
from torch import Tensor


def ring_runs(start: int, count: int, slots: int) -> list[tuple[int, int, int]]:
    """Contiguous runs that hold ``count`` tokens from position ``start`` on: (slot, offset of the
    first token, tokens). Tokens that later ones of them overwrite are left out."""
    runs = []
    offset = max(0, count - slots)
    while offset < count:
        slot = (start + offset) % slots
        length = min(count - offset, slots - slot)
        runs.append((slot, offset, length))
        offset += length
    return runs


def read_ring(ring: Tensor, start: int, end: int, dim: int = 2) -> Tensor:
    """Tokens ``start ... end`` of ``ring`` along ``dim``, in order."""
    slots = torch.arange(start, end, device=ring.device) % ring.shape[dim]
    return ring.index_select(dim, slots)


def write_ring(ring: Tensor, start: int, x: Tensor) -> None:
    """Stores tokens ``x`` from position ``start`` on in ``ring`` ``[B, H, slots, D]``."""
    for slot, offset, n in ring_runs(start, x.shape[2], ring.shape[2]):
        ring[:, :, slot : slot + n] = x[:, :, offset : offset + n]
