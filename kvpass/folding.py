"""Weights that a compiled graph reads permuted: derived once, and again when they have changed."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from kvpass._torch import storage_key, storage_reference
from kvpass.ops.logical import permute_weight

# What a permuted weight is known by: the parameter's id, the order's shape, bytes and the
# dimension.
_Key = tuple[int, tuple[int, ...], bytes, int]


class _Derived:
    """One parameter in one order. Lives as long as a compiled graph holds it."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.tensor: Tensor | None = None

    def derive(self, parameter: Tensor, fold: Fold) -> Tensor:
        """Permutes the parameter as it is now."""
        # Another tensor must not be taken for this one because it has the address.
        self._storage = storage_reference(parameter)
        self._version, self._key = parameter._version, storage_key(parameter)
        self._layout = (parameter.data_ptr(), parameter.stride(), parameter.dtype)
        self.tensor = fold.permuted(parameter)
        return self.tensor

    def current(self, parameter: Tensor) -> Tensor | None:
        """The permuted parameter; None if it has changed, in place or by another storage or
        layout. This runs per weight and step."""
        if (
            self.tensor is not None
            and self.parameter() is parameter
            and self._version == parameter._version
            and self._key == storage_key(parameter)
            and self._layout == (parameter.data_ptr(), parameter.stride(), parameter.dtype)
        ):
            return self.tensor
        return None


_lock = threading.Lock()
# Shared by all graphs: prefill and decode read the same copies.
_shared: weakref.WeakValueDictionary[_Key, _Derived] = weakref.WeakValueDictionary()


class Fold:
    """A weight in another order along one dimension, as an argument of a compiled graph.

    It is derived from the parameter that a call brings, and kept as long as that is alive and has
    not changed: neither in place nor by ``parameter.data = ...``. (A change in place of
    ``parameter.data`` cannot be seen, by autograd neither.)

    Attributes:
        position: of the parameter among the arguments of Dynamo's graph.
    """

    def __init__(self, position: int, order: Tensor, dim: int) -> None:
        """``order``: int64 of any shape, which takes the place of ``dim`` in the result."""
        self.position = position
        self._order, self._dim = order, dim
        self._name = (tuple(order.shape), order.cpu().numpy().tobytes(), dim)
        self._held: dict[int, _Derived] = {}

    def __call__(self, parameter: Tensor) -> Tensor:
        """``parameter``, permuted as it is now."""
        held = self._held.get(id(parameter))
        if held is not None and (current := held.current(parameter)) is not None:
            return current
        if parameter.is_inference():
            # It does not count its changes.
            return self.permuted(parameter)
        with _lock:
            held = self._find(parameter)
            current = held.current(parameter)
            return held.derive(parameter, self) if current is None else current

    def _find(self, parameter: Tensor) -> _Derived:
        # Those of parameters that are gone go with them.
        for key in [key for key, held in self._held.items() if held.parameter() is None]:
            del self._held[key]
        name = (id(parameter), *self._name)
        held = _shared.get(name)
        if held is None or held.parameter() is not parameter:
            held = _shared[name] = _Derived(parameter)
        self._held[id(parameter)] = held
        return held

    def permuted(self, parameter: Tensor) -> Tensor:
        """A permuted copy."""
        # Neither part of an autograd graph nor an inference tensor: it outlives the call.
        with torch.inference_mode(False), torch.no_grad():
            order = self._order.to(parameter.device)
            return permute_weight(parameter.detach(), order, self._dim)
