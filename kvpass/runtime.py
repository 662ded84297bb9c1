"""The callable around a compiled graph: takes cache tensors apart, makes room, puts them together
again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import assert_async
from kvpass.cocktail.call import Placed, place
from kvpass.errors import CacheStateError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.order import ChannelOrder
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.bind.binding import (
    Binding,
    ExtendedOutput,
    FreshOutput,
    PlainBuffer,
    PlainOutput,
    StaticStep,
)
from kvpass.inspect.report import GraphReport
from kvpass.ops.rotary import read_rows
from kvpass.tensor.packed import PackedKV

# What is added to hidden scores is below.
_HIDDEN = -1e4


class PackedCallable:
    """Calls the inner graph with inner tensors. A failed call leaves every cache tensor as it
    was."""

    def __init__(self, inner: Callable[..., Any], binding: Binding, report: GraphReport) -> None:
        self._inner = inner
        self._packed = frozenset(binding.packed)
        self._statics = binding.statics
        self._masks = binding.masks
        self._counts = binding.counts
        self._buffers = binding.buffers
        self._outputs = binding.outputs
        self._chunks = binding.chunks
        self._told = False
        self._folds = binding.folds
        self._constants = binding.constants
        # Of the packed arguments, those whose cosines and sines another one brings.
        self._shared = binding.shared
        self._led = frozenset(p for group in binding.shared for p in group[1:])
        self._extended = [o for o in binding.outputs if isinstance(o, ExtendedOutput)]
        self.report = report

    def __call__(self, *args: Any) -> list[Any]:
        """Dynamo calls this with the arguments of its own graph."""
        for position in self._packed:
            args[position].check()
        steps = [(args[o.argument], o.new(args), o.tokens(args)) for o in self._extended]
        placed = self._place(args)
        for handle, new, after in steps:
            handle.reserve(new, after)
        for group in self._shared:
            share_cos_sin([args[p] for p in group], steps)
        steps += self._static_steps(args)
        flat: list[Any] = []
        for position, arg in enumerate(args):
            if position in self._packed:
                flat.extend(arg.own if position in self._led else arg.state)
            else:
                flat.append(arg)
        flat += [] if placed is None else placed.slots
        flat += [fold(args[fold.position]) for fold in self._folds]
        flat += self._constants
        before = [handle.snapshot(new) for handle, new, _ in steps]
        plain = [_save_plain(buffer, args) for buffer in self._buffers]
        try:
            results = self._inner(*flat)
        except BaseException:
            for (handle, *_), saved in zip(steps, before, strict=True):
                handle.undo(saved)
            for static in self._statics:
                if static.counter is not None:
                    args[static.counter].fill_(_written(static, args))
            for buffer, old in zip(self._buffers, plain, strict=True):
                _changed(buffer, args).copy_(old)
            raise
        for static in self._statics:
            if static.argument is not None:
                args[static.argument].written += static.new(args)
        for buffer, old in zip(self._buffers, plain, strict=True):
            _pack_buffer(buffer, args, old)
        if placed is not None:
            placed.taken()
        return self._wrap(args, results, placed)

    def _place(self, args: Sequence[Any]) -> Placed | None:
        """Where the tokens of a prompt go, if its chunks have bits of their own."""
        if (step := self._chunks) is None:
            return None
        handles = [args[p] for p in step.pasts]
        return place(
            handles, step.levels, step.batch(args), step.new(args), step.device, self._tell
        )

    def _tell(self) -> bool:
        """True at its first call."""
        told, self._told = self._told, True
        return not told

    def _static_steps(self, args: Sequence[Any]) -> list[tuple[PackedKV, int, int]]:
        """The static caches that a step extends in place, new tokens, and lengths after it.

        Raises:
            CacheStateError: if the model's cache counts other tokens than those that are stored.
        """
        # Keys and values of a layer share their counter, layers their mask.
        counted = {(s.counter, _written(s, args)) for s in self._statics if s.counter is not None}
        counters, written = [args[c] for c, _ in counted], [stored for _, stored in counted]
        if counters and counters[0].device.type == "cpu":
            for counter, stored in zip(counters, written, strict=True):
                if int(counter) != stored:
                    raise CacheStateError(
                        f"The static cache counts {int(counter)} tokens where {stored} are stored. "
                        "Use a new cache, or its reset(); its counters cannot be set."
                    )
        elif counters:
            # Without waiting for the device: it is told the numbers with the kernels.
            for stored in dict.fromkeys(written):
                same = [c for c, n in zip(counters, written, strict=True) if n == stored]
                assert_async(torch.stack(same).eq(stored).all())
        for count, argument in self._counts:
            if args[count] != args[argument].written:
                raise CacheStateError(
                    f"The attention mask counts {args[count]} tokens where "
                    f"{args[argument].written} are stored in the static cache."
                )
        for static in self._statics:
            _check_window(static, args)
        handles = {s.argument: s.new(args) for s in self._statics if s.argument is not None}
        for mask, end in {(m, args[a].written + handles[a]) for m, a in self._masks}:
            _check_hidden(args[mask], end)
        return [(args[a], new, args[a].shape[2]) for a, new in handles.items()]

    def _wrap(
        self, args: Sequence[Any], results: Sequence[Any], placed: Placed | None
    ) -> list[Any]:
        wrapped: list[Any] = []
        live: list[weakref.ref[PackedKV]] = []
        for output in self._outputs:
            if isinstance(output, PlainOutput):
                wrapped.append(results[output.index])
                continue
            if isinstance(output, FreshOutput):
                handle = self._fresh(output, args, results, placed)
            else:
                handle = args[output.argument].extended(output.new(args), output.tokens(args))
                if self._chunks is not None and output.argument in self._chunks.pasts:
                    assert placed is not None
                    placed.extended(handle)
            wrapped.append(handle)
            live.append(weakref.ref(handle))
        self.report.live = live
        return wrapped

    @staticmethod
    def _fresh(
        output: FreshOutput, args: Sequence[Any], results: Sequence[Any], placed: Placed | None
    ) -> PackedKV:
        """The cache tensor of a first prompt."""
        plan, new = output.plan, output.new(args)
        state = list(results[output.first : output.first + len(plan.layout.own)])
        if isinstance(plan, ChunkedPlan):
            assert placed is not None
            return placed.fresh(state, plan, new, output.dtype, output.order)
        state += [results[i] for i in output.shared]
        return PackedKV.of_prompt(state, plan, new, output.dtype, output.order, output.stored)


def share_cos_sin(handles: Sequence[PackedKV], steps: Sequence[tuple[PackedKV, int, int]]) -> None:
    """Lets all ``handles`` hold the cosines and sines of the first, with room for what ``steps``
    add to it: handles, new tokens and lengths after them.

    Raises:
        CacheStateError: if they are not the same.
    """
    first, *others = handles
    table, end = first.cos_sin, first.written
    start = 0 if first.plan.window_size is None else max(0, end - first.plan.window_size)
    for other in others:
        # Copies of a cache, or of its rows, are no longer one tensor.
        if other.cos_sin is not table and not (
            other.written == end
            and torch.equal(read_rows(other.cos_sin, start, end), read_rows(table, start, end))
        ):
            raise CacheStateError(
                "The layers of a cache hold other cosines and sines of their positions: they come "
                "from different texts. Use a new cache."
            )
    for handle, new, after in steps:
        if handle is first:
            first.reserve_cos_sin(new, after)
    for other in others:
        other.cos_sin = first.cos_sin


def _written(static: StaticStep, args: Sequence[Any]) -> int:
    """How many tokens the static cache's tensor holds before the step."""
    return 0 if static.argument is None else int(args[static.argument].written)


def _check_window(static: StaticStep, args: Sequence[Any]) -> None:
    """A window slides when it is full; another static cache must have room.

    Raises:
        CacheFullError: if it has none.
        CacheStateError: if the window holds another number of tokens than the graph was made for.
    """
    if static.argument is None:
        return
    handle, new = args[static.argument], static.new(args)
    if static.filled is None:
        handle.reserve(new)
    elif min(handle.written, handle.shape[2]) != static.filled(args):
        raise CacheStateError(
            f"The static window holds {min(handle.written, handle.shape[2])} tokens where "
            f"{static.filled(args)} are counted. Use a new cache, or its reset()."
        )


def _check_hidden(mask: Tensor, written: int) -> None:
    """A static cache's mask ``[..., room]`` must hide what is not written yet.

    Raises:
        CacheStateError: if it does not.
    """
    beyond = mask[..., written:]
    seen = beyond if mask.dtype == torch.bool else beyond > _HIDDEN
    if mask.device.type != "cpu":
        # Without waiting for the device.
        assert_async(~seen.any())
    elif bool(seen.any()):
        raise CacheStateError(
            f"The attention mask shows tokens beyond the {written} that the static cache holds."
        )


def _changed(buffer: PlainBuffer, args: Sequence[Any]) -> Tensor:
    """What a failed call must not leave changed: a window's content, or the number of tokens that
    are written, for what lies behind them is never read."""
    changed: Tensor = args[buffer.argument if buffer.counter is None else buffer.counter]
    return changed


def _save_plain(buffer: PlainBuffer, args: Sequence[Any]) -> Tensor:
    return _changed(buffer, args).clone()


def _packed_state(tokens: Tensor, plan: TensorPlan, order: ChannelOrder | None) -> list[Tensor]:
    stored = tokens if order is None else order.store(tokens)
    state: list[Tensor] = torch.ops.kvpass.pack.default(stored, str(plan))
    return state


def _pack_buffer(buffer: PlainBuffer, args: Sequence[Any], old: Tensor) -> None:
    """Turns a static cache's plain buffer into a `PackedKV`, in place: whatever holds the buffer
    holds the packed tensor then."""
    plain, plan = args[buffer.argument], buffer.plan
    room = plain.shape[2]
    written = room if buffer.counter is None else min(int(old) + buffer.new(args), room)
    order = buffer.order
    # No name for the slice: it would hold the buffer.
    state = _packed_state(plain[:, :, :written], plan, order)
    packed = PackedKV.of_prompt(state, plan, written, plain.dtype, order)
    try:
        torch.utils.swap_tensors(plain, packed)
    except RuntimeError as error:
        warnings.warn(
            f"kvpass: a static cache's buffer stays plain, in {8 * plain.dtype.itemsize} bits: "
            f"something else than the cache holds it ({error}).",
            stacklevel=2,
        )
