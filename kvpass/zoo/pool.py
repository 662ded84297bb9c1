"""Runs families in processes of their own: one that dies or hangs takes no other with it."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from tqdm.auto import tqdm

from kvpass.zoo.outcome import Mode, Outcome
from kvpass.zoo.run import run_mode


@dataclass(frozen=True)
class Settings:
    """What is run of every family.

    Attributes:
        modes: how models are called.
        recipes: names of recipes.
        inner: what compiles the rewritten graphs.
        limit: seconds for one family.
    """

    modes: tuple[Mode, ...] = (Mode(),)
    recipes: tuple[str, ...] = ("fp", "kivi-4bit")
    inner: str = "eager"
    limit: float = 300.0

    @property
    def cases(self) -> list[tuple[Mode, str]]:
        """In the order in which they are run."""
        return [(mode, name) for mode in self.modes for name in self.recipes]


@dataclass
class _Worker:
    family: str
    process: Any
    results: Connection
    until: float
    done: int = 0


# Gives the outcomes of a family in a mode, one per recipe.
Work = Callable[[str, Mode, Sequence[str], str], Iterable[Outcome]]


def run_families(
    families: Sequence[str],
    settings: Settings,
    jobs: int = 1,
    progress: bool = False,
    work: Work = run_mode,
) -> list[Outcome]:
    """The outcomes of all families, in the order of ``families``, ``modes`` and ``recipes``.

    Args:
        families: of `kvpass.zoo.families.family_names`.
        settings: what is run.
        jobs: processes at a time, each with one thread.
        progress: show a bar.
        work: what is called in each process for each mode.
    """
    # A server that has imported everything and started no thread: a process is there at once.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvpass.zoo.run"])
    # The server imports when its first process starts: no family's time.
    first = context.Process()
    first.start()
    first.join()
    outcomes: list[Outcome] = []
    total = len(families) * len(settings.cases)
    with tqdm(total=total, desc="zoo", disable=not progress, leave=False) as bar:
        for outcome in _outcomes(context, list(families), settings, jobs, work):
            outcomes.append(outcome)
            bar.set_postfix_str(outcome.family)
            bar.update()
    place = {name: i for i, name in enumerate(families)}
    return sorted(outcomes, key=lambda outcome: place[outcome.family])


def _outcomes(
    context: Any, waiting: list[str], settings: Settings, jobs: int, work: Work
) -> Iterator[Outcome]:
    """As they come. Those of one family come in order."""
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop(0), settings, work))
            patience = max(0.0, min(w.until for w in running) - time.monotonic())
            ready = wait([w.results for w in running], timeout=patience)
            for worker in list(running):
                told = worker.results in ready
                if told and (outcome := _receive(worker)) is not None:
                    worker.done += 1
                    yield outcome
                elif told or time.monotonic() > worker.until:
                    running.remove(worker)
                    yield from _ended(worker, settings, late=not told)
    finally:
        for worker in running:
            _stop(worker)


def _start(context: Any, family: str, settings: Settings, work: Work) -> _Worker:
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(family, settings, sender, work))
    process.start()
    sender.close()
    return _Worker(family, process, results, time.monotonic() + settings.limit)


def _run(family: str, settings: Settings, results: Connection, work: Work) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for mode in settings.modes:
        for outcome in work(family, mode, settings.recipes, settings.inner):
            results.send(outcome)
    results.close()


def _receive(worker: _Worker) -> Outcome | None:
    """The next outcome; None after the last one."""
    try:
        outcome: Outcome = worker.results.recv()
    except EOFError:
        return None
    return outcome


def _ended(worker: _Worker, settings: Settings, late: bool) -> Iterator[Outcome]:
    """Accounts for the cases that a process has not reported."""
    _stop(worker)
    status = "timeout" if late else "crash"
    problem = (
        f"the family took more than {settings.limit:g} s"
        if late
        else f"the process ended with code {worker.process.exitcode}"
    )
    for mode, name in settings.cases[worker.done :]:
        yield Outcome(worker.family, mode, name, status, problem=problem)


def _stop(worker: _Worker) -> None:
    if worker.results.closed:
        return
    worker.results.close()
    worker.process.join(timeout=1)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
