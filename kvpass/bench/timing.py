"""Interleaved timing of contenders whose results are checked first."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from timeit import Timer

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvpass.machine import synchronize

Call = Callable[[], Tensor]
Clock = Callable[[], float]
# Calls of one CUDA graph: enough to hide what a replay costs beside the kernels.
_GRAPH_CALLS = 16


@dataclass
class Contender:
    """Something to be timed.

    Attributes:
        calls: the same work, each on buffers of its own; taken in turns.
        error: of a result, to be compared with ``tolerance``; NaN is wrong too.
        tolerance: largest error that counts as right.
        bytes_read: by one call.
        note: shown beside the numbers.
        prepare: runs before the first call, untimed.
        capturable: whether CUDA graphs can hold it; otherwise it is launched from Python.
        required: whether an exception is raised; otherwise it becomes the result's ``problem``.
        after_first: returns a further note, once the first call has been made.
    """

    name: str
    calls: Sequence[Call]
    error: Callable[[Tensor], float]
    tolerance: float
    bytes_read: int = 0
    note: str = ""
    prepare: Callable[[], None] | None = None
    capturable: bool = True
    required: bool = False
    after_first: Callable[[], str] | None = None


def made_or_failing(name: str, make: Callable[[], Contender], go_on: bool) -> Contender:
    """The contender that ``make`` makes. With ``go_on``, an exception, now or later, becomes its
    result's ``problem`` and does not stop the others."""
    try:
        contender = make()
    except Exception as error:
        if not go_on:
            raise
        failure = error

        def fail() -> Tensor:
            raise failure

        return Contender(name, [fail], lambda out: math.nan, 0.0)
    contender.required = not go_on
    return contender


@dataclass
class Result:
    """The measurements of one `Contender`.

    Attributes:
        error: the largest of all calls; None if there was none.
        problem: why it did not run, or empty.
        first_call_s: seconds of the first call, compilation included.
        warm_up_s: seconds of the untimed calls after it.
        times_ms: milliseconds per call, one per round.
    """

    name: str
    tolerance: float
    bytes_read: int = 0
    note: str = ""
    error: float | None = None
    problem: str = ""
    first_call_s: float = 0.0
    warm_up_s: float = 0.0
    times_ms: tuple[float, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether the result missed the tolerance; then nothing was timed."""
        return self.error is not None and not self.error <= self.tolerance

    @property
    def median_ms(self) -> float:
        """Median milliseconds per call."""
        return statistics.median(self.times_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """First and third quartile, in milliseconds."""
        if len(self.times_ms) < 2:
            return self.times_ms[0], self.times_ms[0]
        first, _, third = statistics.quantiles(self.times_ms, n=4, method="inclusive")
        return first, third


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    device: torch.device,
    *,
    warm_up: int = 3,
    graphs: bool = False,
    lead: int = 0,
    pause: float = 0.0,
) -> list[Result]:
    """Checks all contenders, then times those that are right, one call of each per round.

    Args:
        contenders: to be compared.
        rounds: timed calls of each.
        device: CUDA events time a GPU, ``timeit`` a CPU.
        warm_up: untimed calls after the checked ones.
        graphs: on a GPU, time replays of a CUDA graph of the calls: kernels without launches.
        lead: untimed calls before each timed one, which then finds in the processor's caches what
            it would in a loop, not what the contender before has left there.
        pause: seconds of idleness before each turn, for threads of the one before to sleep.
    """
    results = [Result(c.name, c.tolerance, c.bytes_read, c.note) for c in contenders]
    timed: list[tuple[Result, Clock]] = []
    steps = len(contenders) * (rounds + 1)
    with tqdm(total=steps, desc="check", disable=None, leave=False) as bar:
        for contender, result in zip(contenders, results, strict=True):
            bar.set_postfix_str(contender.name)
            clock = _prepare(contender, result, device, warm_up, graphs)
            if clock is not None:
                timed.append((result, clock))
            bar.update()
        bar.set_description("time")
        for _ in range(rounds):
            for result, clock in timed:
                time.sleep(pause)
                for _ in range(lead):
                    clock()
                result.times_ms += (clock(),)
                bar.update()
    return results


def _prepare(
    contender: Contender, result: Result, device: torch.device, warm_up: int, graphs: bool
) -> Clock | None:
    """Checks and warms up; the clock of one round, or None if there is nothing to time."""
    try:
        with warnings.catch_warnings():
            if not contender.required:
                warnings.simplefilter("ignore")
            _check(contender, result, device)
            if result.wrong:
                return None
            start = time.perf_counter()
            for call in islice(cycle(contender.calls), warm_up):
                call()
            clock = _clock(contender.calls, device, graphs and contender.capturable)
            synchronize(device)
            result.warm_up_s = time.perf_counter() - start
            return clock
    except Exception as error:
        if contender.required:
            raise
        result.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        return None


def _check(contender: Contender, result: Result, device: torch.device) -> None:
    if contender.prepare is not None:
        contender.prepare()
        synchronize(device)
    for i, call in enumerate(contender.calls):
        start = time.perf_counter()
        out = call()
        synchronize(device)
        if i == 0:
            result.first_call_s = time.perf_counter() - start
        error = contender.error(out)
        # A NaN compares false with everything and must stay.
        if result.error is None or not error <= result.error:
            result.error = error
        if result.wrong:
            return
    if contender.after_first is not None:
        result.note = " ".join(filter(None, (result.note, contender.after_first())))


def _clock(calls: Sequence[Call], device: torch.device, graphs: bool) -> Clock:
    """Milliseconds of the next call, or of an average call of a CUDA graph."""
    turns = cycle(calls)

    def call() -> object:
        return next(turns)()

    if device.type != "cuda":
        timer = Timer(call)
        return lambda: timer.timeit(1) * 1e3
    if not graphs:
        return _event_clock(call, 1)
    count = max(len(calls), _GRAPH_CALLS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    return _event_clock(graph.replay, count)


def _event_clock(call: Callable[[], object], count: int) -> Clock:
    def clock() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    return clock


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``, in float64."""
    wanted = expected.double()
    return float((got.double() - wanted).norm() / wanted.norm())


def memory_copy(moved: int, device: torch.device) -> Call:
    """A copy that moves so many bytes, half in and half out."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s, read and written, of a copy that no cache can hold: the best of ten."""
    moved = (1 << 31) if device.type == "cuda" else (1 << 29)
    clock = _clock([memory_copy(moved, device)], device, graphs=False)
    clock()
    return moved / min(clock() for _ in range(10)) / 1e6
