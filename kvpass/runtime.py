"""The callable around a compiled graph: it passes on the tensors of which cache tensors consist,
makes room in them, and wraps the results."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvpass._torch import assert_async
from kvpass.errors import CacheStateError, RankError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.retention import MAX_STEP
from kvpass.format.sharded_plan import Sharded
from kvpass.graph.bind.binding import (
    Binding,
    ExtendedOutput,
    FreshOutput,
    NumberOutput,
    PaddingArgument,
    Placed,
    PlainBuffer,
    PlainOutput,
    StaticStep,
)
from kvpass.inspect.report import GraphReport
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.sharded import kind_of

# What is added to hidden scores is below.
_HIDDEN = -1e4
# Compiled code takes sizes of 0 and 1 for constants.
_FIRST_ROOM = 2
# Widened masks have a multiple of so many.
_COLUMNS = 256


# Of an argument: the tensors of its state, these but for what another one brings, the argument
# itself, or nothing.
_Part = Literal["state", "own", "itself"] | None


class _Wide(threading.local):
    """Padding masks with columns for more tokens, by their positions, for each thread."""

    def __init__(self) -> None:
        self.masks: dict[int, Tensor] = {}


class PackedCallable:
    """Calls the inner graph with inner tensors. A failed call leaves every cache tensor as it
    was."""

    def __init__(self, inner: Callable[..., Any], binding: Binding, report: GraphReport) -> None:
        self._inner, self._binding, self.report = inner, binding, report
        self._extended = [o for o in binding.outputs if isinstance(o, ExtendedOutput)]
        self._warned = False
        # What the inner graph gets of each argument, in their order; see `_Part`.
        self._parts: list[_Part] = []
        # A number for each room that the cache tensors have had.
        self._rooms: dict[tuple[tuple[int, ...], ...], int] = {}
        self._wide = _Wide()

    def __call__(self, *args: Any) -> list[Any]:
        """Dynamo calls this with the arguments of its own graph."""
        binding = self._binding
        for position in binding.packed:
            args[position].check()
        for branch in [b for position in binding.packed for b in args[position].branches]:
            branch.stay()
        extended = self._steps(args)
        for padding in binding.paddings:
            _check_padding(padding, args)
        placed = None if binding.chunks is None else binding.chunks.place(args, self._first_warning)
        for handle, new, after in extended:
            if new > MAX_STEP or handle.written + new > handle.reserved:
                handle.reserve(new, after)
        for group in binding.shared:
            share_cos_sin([args[p] for p in group], extended)
        steps = [*extended, *self._static_steps(args)]
        flat = self._flat(args, placed)
        before = [handle.snapshot(new) for handle, new, _ in steps]
        plain = [_changed(buffer, args).clone() for buffer in binding.buffers]
        try:
            results = self._inner(*flat)
        except BaseException as error:
            for (handle, *_), saved in zip(steps, before, strict=True):
                handle.undo(saved)
            for static in binding.statics:
                if static.counter is not None:
                    args[static.counter].fill_(_written(static, args))
            for buffer, old in zip(binding.buffers, plain, strict=True):
                _changed(buffer, args).copy_(old)
            if lost := _lost_rank(error, [args[p] for p in binding.packed]):
                raise lost from error
            raise
        for static in binding.statics:
            if static.argument is not None:
                args[static.argument].written += static.new(args)
        for buffer, old in zip(binding.buffers, plain, strict=True):
            _pack_buffer(buffer, args, old)
        if placed is not None:
            placed.succeeded()
        return self._wrap(args, extended, results, placed)

    def _flat(self, args: Sequence[Any], placed: Placed | None) -> list[Any]:
        """The arguments of the inner graph."""
        binding = self._binding
        flat: list[Any] = []
        if not self._parts:
            self._parts = _parts(binding, len(args))
        for arg, part in zip(args, self._parts, strict=True):
            if part == "itself":
                flat.append(arg)
            elif part is not None:
                flat += arg.own if part == "own" else arg.state
        flat += [] if placed is None else placed.scatter_index
        flat += [fold(args[fold.position]) for fold in binding.folds]
        flat += binding.constants
        for number in binding.numbers:
            value = number.value(args)
            flat.append(torch.full((), value, dtype=torch.int64, device=number.device))
        wide = [self._widened(position, args[position]) for position in binding.widened]
        flat += wide
        flat += [args[position].size(dim) for position, dim in binding.sizes]
        if binding.replayed:
            rooms = tuple([args[position].rooms for position in binding.packed])
            rooms += tuple([tuple(mask.shape) for mask in wide])
            flat.append(self._rooms.setdefault(rooms, _FIRST_ROOM + len(self._rooms)))
        return flat

    def _widened(self, position: int, mask: Tensor) -> Tensor:
        """The padding mask, of which attention reads the first columns, in the same memory as at
        most steps."""
        wide = self._wide.masks.get(position)
        if wide is None or len(wide) != len(mask) or wide.shape[1] < mask.shape[1]:
            columns = mask.shape[1] + mask.shape[1] // 4
            with torch.inference_mode(False):
                wide = mask.new_zeros(len(mask), -(-columns // _COLUMNS) * _COLUMNS)
            self._wide.masks[position] = wide
        wide[:, : mask.shape[1]] = mask
        return wide

    def _steps(self, args: Sequence[Any]) -> list[tuple[PackedKV, int, int]]:
        """The cache tensors that a call extends, new tokens, and lengths after it."""
        steps = []
        for output in self._extended:
            handle, new = args[output.argument], output.new(args)
            after = handle.size(2) + new if output.tokens is None else output.tokens(args)
            steps.append((handle, new, after))
        return steps

    def _first_warning(self) -> bool:
        """Whether no other warning came before this one."""
        warned, self._warned = self._warned, True
        return not warned

    def _static_steps(self, args: Sequence[Any]) -> list[tuple[PackedKV, int, int]]:
        """The static caches that a step extends in place, new tokens, and lengths after it; checks
        that the model's cache counts the tokens that are stored."""
        # Keys and values of a layer share their counter, layers their mask.
        counted = {
            (s.counter, _written(s, args)) for s in self._binding.statics if s.counter is not None
        }
        counters, written = [args[c] for c, _ in counted], [stored for _, stored in counted]
        if counters and counters[0].device.type == "cpu":
            for counter, stored in zip(counters, written, strict=True):
                if int(counter) != stored:
                    raise CacheStateError(
                        f"The static cache counts {int(counter)} tokens where {stored} are stored. "
                        "Use a new cache, or its reset(); its counters cannot be set."
                    )
        elif counters:
            # Without waiting for the device: it gets the numbers with the kernels.
            for stored in dict.fromkeys(written):
                same = [c for c, n in zip(counters, written, strict=True) if n == stored]
                assert_async(torch.stack(same).eq(stored).all())
        for count, argument in self._binding.counts:
            if args[count] != args[argument].written:
                raise CacheStateError(
                    f"The attention mask counts {args[count]} tokens where "
                    f"{args[argument].written} are stored in the static cache."
                )
        for static in self._binding.statics:
            _check_window(static, args)
        handles = {s.argument: s.new(args) for s in self._binding.statics if s.argument is not None}
        for mask, end in {(m, args[a].written + handles[a]) for m, a in self._binding.masks}:
            _check_hidden(args[mask], end)
        return [(args[a], new, args[a].shape[2]) for a, new in handles.items()]

    def _wrap(
        self,
        args: Sequence[Any],
        extended: Sequence[tuple[PackedKV, int, int]],
        results: Sequence[Any],
        placed: Placed | None,
    ) -> list[Any]:
        wrapped: list[Any] = []
        live: list[PackedKV] = []
        steps, chunks = iter(extended), self._binding.chunks
        for output in self._binding.outputs:
            if isinstance(output, PlainOutput):
                wrapped.append(results[output.index])
                continue
            if isinstance(output, NumberOutput):
                wrapped.append(output.value(args))
                continue
            if isinstance(output, FreshOutput):
                handle = _fresh(output, args, results, placed)
            else:
                past, new, after = next(steps)
                handle = past.extended(new, after)
                if chunks is not None and output.argument in chunks.pasts:
                    assert placed is not None
                    assert isinstance(handle, ChunkedKV)
                    placed.extended(handle)
            live.append(handle)
            wrapped.append(handle)
        self.report.live = list(map(weakref.ref, live))
        return wrapped


def _lost_rank(error: BaseException, handles: Sequence[PackedKV]) -> RankError | None:
    """What a user is told where a collective has failed; None if none has."""
    shards = [handle.plan.shard for handle in handles if isinstance(handle.plan, Sharded)]
    # Gloo's errors are no more than that.
    failed = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    if not shards or not isinstance(error, RuntimeError) or not failed:
        return None
    rank, size = shards[0].rank, shards[0].size
    return RankError(
        f"Rank {rank} of the {size} that share this cache got no answer from the others: one has "
        "failed, or has not made the same call with the same tokens. The step is undone here; its "
        "tokens on lost ranks are not to be had again, so begin with a new cache on all ranks."
    )


def _check_padding(padding: PaddingArgument, args: Sequence[Any]) -> None:
    """Refuses a mask that shows fewer tokens than there are."""
    columns = args[padding.argument].shape[1]
    tokens = args[padding.packed].size(2) + padding.new(args)
    if columns < tokens:
        raise CacheStateError(
            f"The attention mask has {columns} columns where the cache holds {tokens} tokens, new "
            "ones included. Give one with a column for each of them."
        )


def _parts(binding: Binding, count: int) -> list[_Part]:
    """What the inner graph gets of each of ``count`` arguments."""
    parts: list[_Part] = [None if p in binding.dropped else "itself" for p in range(count)]
    for position in binding.packed:
        parts[position] = "state"
    for _, *led in binding.shared:
        for position in led:
            parts[position] = "own"
    return parts


def _fresh(
    output: FreshOutput, args: Sequence[Any], results: Sequence[Any], placed: Placed | None
) -> PackedKV:
    """The cache tensor of a first prompt."""
    plan, new = output.plan, output.new(args)
    state = list(results[output.first : output.first + len(plan.layout.own)])
    if isinstance(plan, ChunkedPlan):
        assert placed is not None
        return placed.fresh(state, plan, output.dtype, output.basis)
    state += [results[i] for i in output.shared]
    kind = kind_of(plan)
    return kind.of_prompt(state, plan, new, output.dtype, output.basis, output.stored)


def share_cos_sin(handles: Sequence[PackedKV], steps: Sequence[tuple[PackedKV, int, int]]) -> None:
    """Lets all ``handles`` hold the cosines and sines of the first, with room for what ``steps``
    add to it: handles, new tokens and lengths after them.

    Raises:
        CacheStateError: if those that they hold differ.
    """
    first, *others = handles
    for other in others:
        if other.cos_sin is first.cos_sin:
            continue
        # Copies of a cache, or of its rows, are no longer one tensor.
        held = (x.held_cos_sin() for x in (first, other))
        if other.written != first.written or not torch.equal(*held):
            raise CacheStateError(
                "The layers of a cache hold other cosines and sines of their positions: they come "
                "from different texts. Use a new cache."
            )
    for handle, new, after in steps:
        if handle is first:
            first.reserve_cos_sin(new, after)
    for other in others:
        other.hold("cos_sin", first.cos_sin)


def _written(static: StaticStep, args: Sequence[Any]) -> int:
    """The number of tokens that the static cache's tensor holds before the step."""
    return 0 if static.argument is None else int(args[static.argument].written)


def _check_window(static: StaticStep, args: Sequence[Any]) -> None:
    """Checks that a window holds as many tokens as the graph was made for: it slides when it is
    full; another static cache must have room."""
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
    """Checks that a static cache's mask ``[..., room]`` hides what is not written yet."""
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
    """The argument that a failed call must not leave changed: a window, or the number of written
    tokens, for slots behind them are never read."""
    changed: Tensor = args[buffer.argument if buffer.counter is None else buffer.counter]
    return changed


def _pack_buffer(buffer: PlainBuffer, args: Sequence[Any], old: Tensor) -> None:
    """Turns a static cache's plain buffer into a `PackedKV`, in place: whatever holds the buffer
    holds the packed tensor then."""
    plain, plan, basis = args[buffer.argument], buffer.plan, buffer.basis
    room = plain.shape[2]
    written = room if buffer.counter is None else min(int(old) + buffer.new(args), room)
    tokens = plain[:, :, :written]
    tokens = tokens if basis is None else basis.store(tokens)
    state = torch.ops.kvpass.pack.default(tokens, str(plan))
    # It would hold the buffer.
    del tokens
    packed = PackedKV.of_prompt(state, plan, written, plain.dtype, basis)
    try:
        torch.utils.swap_tensors(plain, packed)
    except RuntimeError as error:
        warnings.warn(
            f"kvpass: a static cache's buffer stays plain, in {8 * plain.dtype.itemsize} bits: "
            f"something else than the cache holds it ({error}).",
            stacklevel=2,
        )
