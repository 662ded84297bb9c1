"""Tasks of EleutherAI's lm-evaluation-harness, for recipes beside the plain model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from kvpass._torch import is_compiled
from kvpass.errors import OptionError, cut, shown
from kvpass.evaluate.packed_lm import PackedLM
from kvpass.evaluate.runner import (
    PLAIN,
    compiled_twin,
    digest,
    is_calibrated,
    measure_each,
    planners,
)
from kvpass.evaluate.settings import Settings
from kvpass.evaluate.store import Record, Store
from kvpass.evaluate.texts import split_texts
from kvpass.fingerprint import fingerprint
from kvpass.machine import machine
from kvpass.plan import Plan
from kvpass.recipes import Recipe

# What a record keeps of the harness's results, and what it leaves out of a document's.
_KEPT = ("results", "n-shot", "n-samples", "higher_is_better", "versions")
_LONG = ("doc", "arguments")


@dataclass(frozen=True)
class HarnessTasks:
    """Tasks with their data.

    Attributes:
        names: as they were given.
        metadata: what tasks that make their data were told.
        manager: lm_eval's index of tasks.
        loaded: tasks and groups of lm_eval.
    """

    names: tuple[str, ...]
    metadata: Mapping[str, Any]
    manager: Any
    loaded: Sequence[Any]


def find_tasks(
    names: Sequence[str], folder: str | None = None, metadata: Mapping[str, Any] | None = None
) -> HarnessTasks:
    """Loads tasks by the harness's names, and their data.

    Args:
        names: of tasks, groups or tags, also with ``*``, or YAML files.
        folder: with YAML files of own tasks, beside the harness's; its ``include_path``.
        metadata: for tasks that make their data, RULER's say:
            ``{"pretrained": "a/model", "max_seq_lengths": [4096]}``.

    Raises:
        OptionError: if there is no such folder or task, or a task cannot be loaded.
    """
    if folder is not None and not Path(folder).is_dir():
        raise OptionError(f"'{folder}' is not a folder of tasks.")
    manager = TaskManager(include_path=folder, metadata=dict(metadata or {}))
    return HarnessTasks(tuple(names), metadata or {}, manager, load_tasks(manager, names))


def load_tasks(manager: Any, names: Sequence[str]) -> list[Any]:
    """Tasks and groups of lm_eval.

    Raises:
        OptionError: if there is no such task, or it cannot be loaded.
    """
    found: dict[str, list[Any]] = {}
    for name in names:
        matches = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not matches:
            close = ", ".join(get_close_matches(name, manager.all_tasks, n=5, cutoff=0.5))
            hint = f"the nearest names: {close}" if close else "'lm-eval ls tasks' lists them"
            raise OptionError(f"Unknown task {shown(name)}; {hint}.")
        found.update((match, _loaded(manager, match)) for match in matches)
    return [task for tasks in found.values() for task in tasks]


def _loaded(manager: Any, name: str) -> list[Any]:
    """A group, a task, or the tasks of a tag."""
    try:
        found = manager.load([name])
    except Exception as error:
        # Whatever a data set, the hub or a package that the task needs has to say.
        reason = (cut(str(error)) or type(error).__name__).rstrip(".")
        raise OptionError(f"Task {shown(name)} cannot be loaded: {reason}.") from error
    group = found["groups"].get(name)
    return list(found["tasks"].values()) if group is None else [group]


def run_tasks(
    model: Any,
    tokenizer: Any,
    recipes: Sequence[str],
    tasks: HarnessTasks,
    settings: Settings | None = None,
    *,
    limit: float | None = None,
    num_fewshot: int | None = None,
    calibration_texts: Iterable[Any] = (),
    path: str | None = None,
    progress: bool = True,
) -> Sequence[Record]:
    """Runs tasks with the plain model, then with each recipe through its packed cache.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        tokenizer: its own.
        recipes: as in a command line, e.g. ``kivi-2bit,group=64``, or files of plans.
        tasks: see `find_tasks`.
        settings: ``prompt``, ``length``, ``batch``, ``samples`` and ``inner`` count.
        limit: documents of each task at most, or the share of them if below 1.
        num_fewshot: examples in front of each document, for tasks that do not fix it at 0.
        calibration_texts: for calibrated recipes.
        path, progress: see `kvpass.evaluate.evaluate`.

    Returns:
        A record for the plain model and for each recipe; of one that failed, with its problem.

    Raises:
        OptionError: if an argument is not allowed, the harness refuses a task, or the file is of
            another run.
        PlanError: if the file of a plan cannot be read.
    """
    if is_compiled(model):
        raise OptionError("The model is compiled; give it as it was before model.compile.")
    chosen, wanted = planners(recipes), settings or Settings()
    _, texts, _ = split_texts((), calibration_texts, calibrates=False)
    seeing = [name for name, planner in chosen.items() if is_calibrated(planner)]
    if seeing and not texts:
        raise OptionError(
            f"Recipe {shown(seeing[0])} is calibrated: give texts for that (--calibration)."
        )
    request = {"limit": limit, "num_fewshot": num_fewshot}

    def measure(name: str, planner: Recipe | Plan | None, store: Store) -> None:
        if store.done(recipe=name):
            return
        if hasattr(planner, "chunk_bits"):
            # Its tokens would stay exact.
            store.add({"recipe": name, "task": "lm-eval", "skipped": "needs a question"})
            return
        twin = model
        if planner is not None:
            twin = compiled_twin(model, planner, tokenizer, texts, wanted, progress)
        lm = PackedLM(
            twin, tokenizer, batch=wanted.batch, prompt=wanted.prompt, length=wanted.length
        )
        store.add({"recipe": name, "task": "lm-eval", **_results(lm, tasks, request)})

    header = {
        **asdict(wanted),
        **request,
        "names": tasks.names,
        "metadata": tasks.metadata,
        "lm_eval": version("lm_eval"),
        "model": digest(fingerprint(model, [""])),
        "texts": digest(texts),
    }
    store = Store(path, header, {"machine": machine()})
    measure_each(chosen, measure, store, progress)
    return [r for r in store.records if r["recipe"] in (PLAIN, *chosen)]


def _results(lm: PackedLM, tasks: HarnessTasks, request: Mapping[str, Any]) -> Record:
    """What the harness finds, as JSON has it, and the size of the cache."""
    start = time.perf_counter()
    try:
        found = simple_evaluate(lm, tasks=list(tasks.loaded), task_manager=tasks.manager, **request)
    except (AssertionError, ValueError) as error:
        raise OptionError(f"The harness refuses: {cut(str(error))}") from error
    samples = {
        task: [{k: v for k, v in sample.items() if k not in _LONG} for sample in documents]
        for task, documents in found["samples"].items()
    }
    kept = {name: found[name] for name in _KEPT}
    more = {"seconds": time.perf_counter() - start, "shortened": lm.shortened, **lm.size}
    record: Record = json.loads(json.dumps({**kept, "samples": samples, **more}, default=str))
    return record
