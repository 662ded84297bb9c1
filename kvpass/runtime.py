"""The callable around a compiled graph: takes cache tensors apart, makes room, puts them together
again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvpass.cache.packed import PackedKV
from kvpass.cache.residency import MAX_STEP
from kvpass.graph.bind import Binding, ExtendedOutput, FreshOutput, PlainOutput
from kvpass.inspect.report import GraphReport


class PackedCallable:
    """Calls the inner graph with inner tensors. A failed call leaves every cache tensor as it
    was."""

    def __init__(self, inner: Callable[..., Any], binding: Binding, report: GraphReport) -> None:
        self._inner = inner
        self._packed = frozenset(binding.packed)
        self._outputs = binding.outputs
        self._extended = [o for o in binding.outputs if isinstance(o, ExtendedOutput)]
        self._report = report

    def __call__(self, *args: Any) -> list[Any]:
        """Dynamo calls this with the arguments of its own graph."""
        for position in self._packed:
            args[position].check()
        steps = [(args[o.argument], o.new(args)) for o in self._extended]
        for handle, new in steps:
            handle.reserve(new)
        flat: list[Any] = []
        for position, arg in enumerate(args):
            if position in self._packed:
                flat.extend(arg.state)
            else:
                flat.append(arg)
        before = [_save(handle, new) for handle, new in steps]
        try:
            results = self._inner(*flat)
        except BaseException:
            for (handle, _), saved in zip(steps, before, strict=True):
                _restore(handle, saved)
            raise
        return self._wrap(args, results)

    def _wrap(self, args: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        wrapped: list[Any] = []
        live: list[weakref.ref[PackedKV]] = []
        for output in self._outputs:
            if isinstance(output, PlainOutput):
                wrapped.append(results[output.index])
                continue
            if isinstance(output, FreshOutput):
                names = output.plan.state_names
                state = results[output.first : output.first + len(names)]
                handle = PackedKV(state, output.plan, output.tokens(args), output.dtype)
                handle.mark_dynamic()
            else:
                handle = args[output.argument].extended(output.new(args))
            wrapped.append(handle)
            live.append(weakref.ref(handle))
        self._report.live = live
        return wrapped


def _save(handle: PackedKV, new: int) -> list[Tensor] | None:
    """What a step of ``new`` tokens may overwrite of ``handle``.

    A step of up to MAX_STEP tokens overwrites nothing (see `TensorPlan.ring`): only its count must
    go back.
    """
    if new <= MAX_STEP or handle.plan.codec.identity:
        return None
    return [handle.window.clone(), handle.ends.clone()]


def _restore(handle: PackedKV, saved: list[Tensor] | None) -> None:
    if saved is None:
        handle.ends[:, -1] = handle.shape[2]
    else:
        handle.window.copy_(saved[0])
        handle.ends.copy_(saved[1])
