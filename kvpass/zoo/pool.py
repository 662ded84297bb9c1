"""Runs families in processes of their own: one that dies or hangs takes no other with it."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import torch
from tqdm.auto import tqdm

from kvpass.zoo.outcome import Mode, Outcome
from kvpass.zoo.run import run_mode

# Starting a process and waiting for one look after all that this process has started.
_PROCESSES = Lock()


@dataclass(frozen=True)
class Settings:
    """The runs of every family, for at most ``limit`` seconds: modes, names of recipes, and what
    compiles the rewritten graphs."""

    modes: tuple[Mode, ...] = (Mode(),)
    recipes: tuple[str, ...] = ("fp", "kivi-4bit")
    inner: str = "eager"
    limit: float = 300.0


# Gives the outcomes of a family in a mode, one per recipe.
Work = Callable[[str, Mode, Sequence[str], str], Iterable[Outcome]]


def run_families(
    families: Sequence[str],
    settings: Settings,
    jobs: int = 1,
    work: Work = run_mode,
) -> list[Outcome]:
    """The outcomes of all families, in the order of ``families``, ``modes`` and ``recipes``.

    Each of the ``jobs`` processes at a time has one thread, and calls ``work`` for each mode.
    """
    # A server that has imported everything and started no thread: a process is there at once.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvpass.zoo.run"])
    # The server imports when its first process starts: no family's time.
    first = context.Process()
    first.start()
    first.join()

    def run(family: str) -> list[Outcome]:
        outcomes = _run_family(context, family, settings, work)
        bar.set_postfix_str(family)
        bar.update()
        return outcomes

    with (
        tqdm(total=len(families), desc="zoo", disable=None, leave=False) as bar,
        ThreadPoolExecutor(jobs) as threads,
    ):
        return list(chain.from_iterable(threads.map(run, families)))


def _run_family(context: Any, family: str, settings: Settings, work: Work) -> list[Outcome]:
    """The outcomes of one process; those that it does not report are its end's."""
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(family, settings, sender, work))
    with _PROCESSES:
        process.start()
    sender.close()
    outcomes, until, late = [], time.monotonic() + settings.limit, True
    try:
        while results.poll(max(0.0, until - time.monotonic())):
            outcomes.append(results.recv())
    except EOFError:
        late = False
    with _PROCESSES:
        process.join(timeout=0 if late else 1)
        process.kill()
        process.join()
    status, problem = "crash", f"the process ended with code {process.exitcode}"
    if late:
        status, problem = "timeout", f"the family took more than {settings.limit:g} s"
    cases = [(mode, name) for mode in settings.modes for name in settings.recipes]
    missing = cases[len(outcomes) :]
    return outcomes + [Outcome(family, *case, status, problem=problem) for case in missing]


def _work(family: str, settings: Settings, results: Connection, work: Work) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for mode in settings.modes:
        for outcome in work(family, mode, settings.recipes, settings.inner):
            results.send(outcome)
    results.close()
