"""Weights that a compiled graph reads in another basis: derived once, and again when they have
changed."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kvpass._torch import local_shard, storage_key
from kvpass.ops.basis import rotate_weight

# The parameter's id, the basis's shape and bytes, and the dimension.
_Key = tuple[int, tuple[int, ...], bytes, int]


class _Derived:
    """One parameter in one basis. Lives as long as a compiled graph holds it."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.tensor: Tensor | None = None

    def derive(self, parameter: Tensor, fold: Fold) -> Tensor:
        """Rotates the parameter as it is now."""
        # Another tensor must not be taken for this one because it has the address.
        self._storage = StorageWeakRef(parameter.untyped_storage())
        self._content = _content(parameter)
        self.tensor = fold.rotated(parameter)
        return self.tensor

    def current(self, parameter: Tensor) -> Tensor | None:
        """The rotated parameter; None if it has changed. This runs for every weight and step."""
        known = self.tensor is not None and self.parameter() is parameter
        return self.tensor if known and self._content == _content(parameter) else None


def _content(x: Tensor) -> tuple[object, ...]:
    """Differs when ``x`` has changed, in place or by another storage or layout."""
    return x._version, storage_key(x), x.data_ptr(), x.stride(), x.dtype


_lock = threading.Lock()
# Shared by all graphs: prefill and decode read the same copies.
_shared: weakref.WeakValueDictionary[_Key, _Derived] = weakref.WeakValueDictionary()


class Fold:
    """A weight in another basis along one dimension, as an argument of a compiled graph.

    It is derived from the parameter that a call brings, and kept as long as that is alive and has
    not changed: neither in place nor by ``parameter.data = ...``. (A change in place of
    ``parameter.data`` cannot be seen, by autograd neither.)

    Of a ``DTensor`` it is this process's part.

    Args:
        position: the parameter's among the arguments of Dynamo's graph.
        basis: an order, int64 of any shape, which replaces ``dim`` in the result, or a rotation
            ``[blocks, C / blocks, C / blocks]``.
        dim: the dimension that is rotated.
    """

    def __init__(self, position: int, basis: Tensor, dim: int) -> None:
        self.position = position
        self._basis, self._dim = basis, dim
        self._name = (tuple(basis.shape), basis.cpu().numpy().tobytes(), dim)
        self._held: dict[int, _Derived] = {}

    def __call__(self, parameter: Tensor) -> Tensor:
        """``parameter``, rotated as it is now."""
        parameter = local_shard(parameter)
        held = self._held.get(id(parameter))
        if held is not None and (current := held.current(parameter)) is not None:
            return current
        if parameter.is_inference():
            # It does not count its changes.
            return self.rotated(parameter)
        with _lock:
            held = self._find(parameter)
            current = held.current(parameter)
            return held.derive(parameter, self) if current is None else current

    def _find(self, parameter: Tensor) -> _Derived:
        # Drops what was derived of parameters that are gone.
        for key in [key for key, held in self._held.items() if held.parameter() is None]:
            del self._held[key]
        name = (id(parameter), *self._name)
        held = _shared.get(name)
        if held is None or held.parameter() is not parameter:
            held = _shared[name] = _Derived(parameter)
        self._held[id(parameter)] = held
        return held

    def rotated(self, parameter: Tensor) -> Tensor:
        """A copy in the other basis."""
        # Neither part of an autograd graph nor an inference tensor: it outlives the call.
        with torch.inference_mode(False), torch.no_grad():
            basis = self._basis.to(parameter.device)
            return rotate_weight(parameter.detach(), basis, self._dim)
