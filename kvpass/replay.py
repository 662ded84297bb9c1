"""Decode steps on a CPU without the Python between their kernels: the calls of one step are
recorded, and made again in the next ones, as CUDA graphs do on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from kvpass._torch import inner_names, is_subclass
from kvpass._torch_calls import Again, Call, CompiledModule, recording
from kvpass._torch_sizes import shape_symbols, symbols_of
from kvpass.graph.analysis.effects import memory, written

# Bytes of an argument that is copied before a step, like token ids, where it is not what it was.
_MOST_COPIED = 2**16
# Caches whose steps are kept, each with the memory of a step's intermediate results.
_MOST_RECORDINGS = 4
# Steps in a row with another number of the host, behind which nobody waits for two alike.
_MOST_CHANGES = 8
# One thread at a time records: graphs may have modules in common.
_recording = threading.Lock()


def changed_arguments(graph: Graph) -> set[int]:
    """The positions of arguments that a bound graph may write to."""
    arguments = list(graph.find_nodes(op="placeholder"))
    targets = {target for node in graph.nodes for target in written(node)}
    memories = {memory(target) for target in targets}
    if any(memory(target) is None and target not in arguments for target in targets):
        return set(range(len(arguments)))
    return {i for i, x in enumerate(arguments) if x in targets or memory(x) in memories - {None}}


def replay_obstacle(graph: Graph, examples: Sequence[Any], state: Collection[int]) -> str | None:
    """Why no step of a bound graph can be made again, or None.

    Args:
        graph: with examples of its arguments.
        examples: what it is compiled for.
        state: positions of the inner tensors of caches; a number tells their sizes.
    """
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in examples):
        return "it is differentiated"
    sizes = {s for x in examples if isinstance(x, torch.SymInt) for s in symbols_of(x)}
    for i, (node, x) in enumerate(zip(graph.find_nodes(op="placeholder"), examples, strict=True)):
        if not isinstance(x, Tensor):
            continue
        if x.device.type != "cpu":
            return f"its argument {node.name} is not on the CPU"
        if i not in state and not shape_symbols(x) <= sizes:
            return f"its argument {node.name} has a size that changes"
    return None


@dataclass(frozen=True, eq=False)
class _Recording:
    """A step.

    Attributes:
        parts: what makes its calls again.
        copied: arguments that it reads from tensors of its own.
        results: for each result the number of the argument that it is, or what holds it.
        held: what the calls read and write, but for the arguments.
        lock: for the threads that make them again.
    """

    parts: list[Again]
    copied: list[tuple[int, Tensor]]
    results: list[Any]
    held: list[Any]
    lock: threading.Lock

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        given = list(args)
        for position, own in self.copied:
            given[position] = own.copy_(args[position])
        for part in self.parts:
            part(given)
        return [_passed_on(x, args) for x in self.results]


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument."""

    position: int


def _passed_on(result: Any, args: Sequence[Any]) -> Any:
    """What a caller gets; the next step writes its results to the same memory."""
    if isinstance(result, _Argument):
        return args[result.position]
    return result.clone() if isinstance(result, Tensor) else result


class Replayed:
    """A compiled graph that records a step when it meets the same memory a second time, and makes
    that step's calls again from the third time on.

    Positions of arguments count the tensors inside of quantized weights, too, behind the others.

    Args:
        compiled: the graph.
        modules: those of its code.
        changed: positions of arguments that it may write to.
        repeat: what makes recorded calls again, one part after the other.
        tell: gets the reason why no step can be made again, once that is known.
    """

    def __init__(
        self,
        compiled: Callable[..., list[Any]],
        modules: Sequence[CompiledModule],
        changed: Collection[int],
        repeat: Callable[[Sequence[Call | Again]], list[Again]],
        tell: Callable[[str], None],
    ) -> None:
        self._compiled, self._modules, self._kept = compiled, modules, set(changed)
        self._repeat, self._tell, self._possible = repeat, tell, True
        self._inner: list[tuple[int, Callable[[Any], Tensor]]] | None = None
        self._last = deque[tuple[int, ...]](maxlen=_MOST_RECORDINGS)
        self._copied: set[int] = set()
        self._fixed: list[int] = []
        self._seen: set[tuple[int, ...]] = set()
        self._new = 0
        self._recordings: dict[tuple[int, ...], _Recording] = {}

    def __call__(self, *args: Any) -> list[Any]:
        """The results of the graph."""
        if not self._possible:
            return self._compiled(*args)
        if self._inner is None:
            self._inner = _inner_tensors(args)
            # A copy of one cannot be given in its place.
            self._kept |= set(range(len(args), len(args) + len(self._inner)))
        given = [*args, *(get(args[i]) for i, get in self._inner)]
        for i, _ in self._inner:
            given[i] = None
        numbers = tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in given])
        place = self._place(numbers)
        known = self._recordings.get(place)
        # Another thread may be in this very step.
        if known is not None and known.lock.acquire(blocking=False):
            try:
                return known(given)
            finally:
                known.lock.release()
        return self._compiled(*args) if known else self._call_unknown(args, given, numbers)

    def _call_unknown(
        self, args: Sequence[Any], given: Sequence[Any], numbers: tuple[int, ...]
    ) -> list[Any]:
        """A call in other memory: the first one, and one that is recorded."""
        moved = self._moved(given, numbers)
        self._last.appendleft(numbers)
        if moved is None:
            self._count_numbers(tuple([x for x in args if not isinstance(x, Tensor)]))
        if moved is None or not _recording.acquire(blocking=False):
            return self._compiled(*args)
        try:
            if moved:
                self._copied |= moved
                self._fixed = [i for i in range(len(numbers)) if i not in self._copied]
                self._recordings.clear()
            recorded, results = self._record(args, given)
            if recorded is not None:
                while len(self._recordings) >= _MOST_RECORDINGS:
                    del self._recordings[next(iter(self._recordings))]
                self._recordings[self._place(numbers)] = recorded
            return results
        finally:
            _recording.release()

    def _moved(self, given: Sequence[Any], numbers: tuple[int, ...]) -> set[int] | None:
        """The arguments that lie elsewhere than in one of the last calls, if all may be copied.
        (Caches may take turns.)"""
        for last in tuple(self._last):
            moved = {i for i, (x, y) in enumerate(zip(last, numbers, strict=True)) if x != y}
            moved -= self._copied
            if all(self._may_be_copied(i, given[i]) for i in moved):
                return moved
        return None

    def _place(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """What a recording is made for: the memory, and how it is used."""
        fixed = [numbers[i] for i in self._fixed or range(len(numbers))]
        return (torch.get_num_threads(), torch.is_inference_mode_enabled(), *fixed)

    def _count_numbers(self, numbers: tuple[int, ...]) -> None:
        self._new = 0 if numbers in self._seen else self._new + 1
        self._seen.add(numbers)
        if self._new > _MOST_CHANGES:
            self._refuse("a number among its arguments is another one at every step")

    def _refuse(self, reason: str) -> None:
        self._possible = False
        self._tell(reason)

    def _may_be_copied(self, position: int, value: Any) -> bool:
        if not isinstance(value, Tensor) or position in self._kept:
            return False
        sizes = list(zip(value.shape, value.stride(), strict=True))
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
        # One that repeats elements cannot be written.
        repeats = any(size > 1 and stride == 0 for size, stride in sizes)
        return not repeats and extent * value.itemsize <= _MOST_COPIED

    def _record(
        self, args: Sequence[Any], given: Sequence[Any]
    ) -> tuple[_Recording | None, list[Any]]:
        """Computes a step and notes what it calls, unless that cannot be made again."""
        copied = [(i, _copy(given[i])) for i in sorted(self._copied)]
        called, read = list(args), list(given)
        for position, own in copied:
            called[position] = read[position] = own
        with recording(self._modules, read) as recorder:
            results = self._compiled(*called)
        positions = {id(x): i for i, x in enumerate(read) if isinstance(x, Tensor)}
        made = [_Argument(positions[id(x)]) if id(x) in positions else x for x in results]
        if any(isinstance(x, Tensor) and recorder.is_known(x) for x in made):
            recorder.refuse("a result is a part of an argument")
        passed = [_passed_on(x, args) for x in made]
        if recorder.problem is not None:
            self._refuse(recorder.problem)
            return None, passed
        parts = self._repeat(recorder.calls)
        return _Recording(parts, copied, made, recorder.held, threading.Lock()), passed


def _inner_tensors(args: Sequence[Any]) -> list[tuple[int, Callable[[Any], Tensor]]]:
    """The positions of tensors that wrap others, and what reads each of these."""
    wrapped = [(i, x) for i, x in enumerate(args) if isinstance(x, Tensor) and is_subclass(x)]
    return [(i, attrgetter(name)) for i, x in wrapped for name in inner_names(x)]


def _copy(x: Tensor) -> Tensor:
    """A copy that compiled code reads alike: ``clone`` closes gaps."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return made.copy_(x)
