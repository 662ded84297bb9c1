"""Rows of a batch that begin with the same tokens, and hold them once.

The tokens lie in a file without a name, in memory, which the tensors of each row map privately:
what a row writes behind them, or over them, goes to pages of its own. Kernels see a batch like any
other. So it is on Linux, on CPUs; elsewhere rows are copies.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.format.layout import Field
from kvpass.ops.ring import ring_runs
from kvpass.tensor.branches import another

PAGE = mmap.PAGESIZE
# Python's mmap has no name for it, and chooses addresses itself.
_MAP_FIXED = 0x10
# What the tensors at these addresses map.
_mapped: dict[int, Prefix] = {}


class Prefix:
    """The tokens that rows begin with.

    Attributes:
        nbytes: that they take.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
        """``tensors`` have one row for each beginning, of which each dimension begins one of these
        ``shapes``, whose rows are whole pages.

        Raises:
            OSError: if the system gives no more files or memory.
        """
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._file = os.memfd_create("kvpass")
        weakref.finalize(self, os.close, self._file)
        self._shapes, self._starts, end = shapes, {}, 0
        for name, tensor in tensors.items():
            self._starts[name] = end
            end += math.prod(shapes[name]) * tensor.element_size()
        os.ftruncate(self._file, end)
        whole = mmap.mmap(self._file, end)
        for name, tensor in tensors.items():
            new = _tensor(whole, shapes[name], tensor.dtype, self._starts[name])
            new[tuple(map(slice, tensor.shape))] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self._starts

    def tensor(self, name: str, origins: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose rows begin as those of ``origins``.

        Raises:
            OSError: if the system gives no more memory or mappings.
        """
        shape = (len(origins), *self._shapes[name][1:])
        row = math.prod(shape[1:]) * dtype.itemsize
        memory = mmap.mmap(-1, len(origins) * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = _tensor(memory, shape, dtype)
        address = found.data_ptr()
        for at, origin in enumerate(origins):
            _map(address + at * row, row, self._file, self._starts[name] + origin * row)
        _mapped[address] = self
        weakref.finalize(memory, _mapped.pop, address)
        return found


@dataclass(frozen=True)
class Rows:
    """How the rows of a batch begin.

    Attributes:
        prefix: what they map.
        origins: of each row, the row of ``prefix``.
        common: how many packed tokens of it no row has changed.
        exact: the positions of tokens that rows may have written into the exact window.
    """

    prefix: Prefix
    origins: tuple[int, ...]
    common: int
    exact: range

    def after(self, stored: int, written: int) -> Rows:
        """These rows when of them ``stored`` packed tokens are wanted, and ``written`` is where
        their last segment ends."""
        end = max(self.exact.stop, written)
        return replace(self, common=min(self.common, stored), exact=range(self.exact.start, end))

    def own(self, field: Field, tensor: Tensor, stored: int) -> list[tuple[int, int]]:
        """The entries of ``tensor``, first and number, that are not those of `prefix`, where there
        are ``stored`` packed tokens."""
        if field.grows is not None:
            first = self.common // field.group
            return [(first, -(-stored // field.group) - first)]
        if field.name != "window":
            return []
        slots = tensor.shape[token_dim(field)]
        return [(slot, n) for slot, _, n in ring_runs(self.exact.start, len(self.exact), slots)]


def token_dim(field: Field) -> int:
    """The dimension of tokens in a field that rows may share."""
    return 2 if field.grows is None else field.token_dim


def mapped(tensor: Tensor) -> Prefix | None:
    """What ``tensor`` maps; None: it has its memory for itself."""
    return _mapped.get(tensor.data_ptr())


def own_bytes(tensor: Tensor, dim: int, own: Sequence[tuple[int, int]]) -> int:
    """The bytes of the pages in which entries ``own`` along ``dim`` are, first and number of
    each."""
    entry = math.prod(tensor.shape[dim + 1 :]) * tensor.element_size()
    step, pages = tensor.shape[dim] * entry, set[int]()
    for start in range(0, math.prod(tensor.shape[:dim]) * step, step):
        for first, count in own:
            if count > 0:
                end = start + (first + count) * entry
                pages.update(range((start + first * entry) // PAGE, -(-end // PAGE)))
    return len(pages) * PAGE


def _tensor(memory: mmap.mmap, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
    """A tensor in ``memory`` from byte ``start`` on, which lives as long as it."""
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start)
    return another(flat.view(shape))


def _map(address: int, length: int, file: int, start: int) -> None:
    """Maps a part of ``file`` at ``address``, privately.

    Raises:
        OSError: if that fails.
    """
    system, pointer = ctypes.CDLL(None, use_errno=True).mmap, ctypes.c_void_p
    system.restype = pointer
    system.argtypes = [pointer, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if system(address, length, access, flags, file, start) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
