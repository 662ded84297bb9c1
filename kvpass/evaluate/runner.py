"""`evaluate`: recipes on a user's own model, one after the other."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeGuard

import torch
from torch import Tensor
from tqdm.auto import tqdm

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import is_compiled
from kvpass.calibration.calibrate import calibrate
from kvpass.cocktail import TokenEmbeddings, use
from kvpass.errors import OptionError, cut, shown
from kvpass.evaluate.answers import Chooser, answers
from kvpass.evaluate.depth import SUMS, Reference, batch_sums, text_batches
from kvpass.evaluate.documents import Sample, Writer
from kvpass.evaluate.quality import cache_size, predictions
from kvpass.evaluate.settings import Settings
from kvpass.evaluate.store import Record, Store
from kvpass.evaluate.texts import split_texts
from kvpass.fingerprint import fingerprint
from kvpass.machine import machine
from kvpass.options import written_planner
from kvpass.plan import Plan
from kvpass.recipes import Recipe

PLAIN, QUALITY = "plain", "quality"


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        settings: with the lengths that were used.
        recipes: as they were written, without the plain model.
        records: of the plain model and of recipes; the lines of the file.
        notes: sentences about the texts.
    """

    settings: Settings
    recipes: tuple[str, ...]
    records: Sequence[Record]
    notes: tuple[str, ...]


def evaluate(
    model: Any,
    tokenizer: Any,
    recipes: Sequence[str],
    texts: Iterable[Any],
    settings: Settings | None = None,
    *,
    calibration_texts: Iterable[Any] | None = None,
    path: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Measures the plain model, then each recipe through its packed cache.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        tokenizer: its own.
        recipes: as in a command line, e.g. ``kivi-2bit,group=64``, or files of plans.
        texts: held-out texts, or mappings with ``text``: what is scored, and fillers of documents.
        settings: None: the defaults.
        calibration_texts: for calibrated recipes; None: each fourth of ``texts`` is for them, and
            never scored.
        path: a file of JSON lines: measurements are appended, and those in it are not made again.
        progress: show bars.

    Returns:
        All measurements. A recipe that fails has a record with its problem.

    Raises:
        OptionError: if an argument is not allowed, or the file is of another run.
        PlanError: if the file of a plan cannot be read.
    """
    if is_compiled(model):
        raise OptionError("The model is compiled; give it as it was before model.compile.")
    chosen = planners(recipes)
    calibrates = any(map(is_calibrated, chosen.values()))
    held_out, own, sentence = split_texts(texts, calibration_texts, calibrates)
    wanted = (settings or Settings()).of_model(model.config)
    run = _Run(model, tokenizer, wanted, held_out, own, progress)
    header = {
        **asdict(wanted),
        "model": digest(fingerprint(model, [""])),
        "texts": digest([held_out, own]),
    }
    notes = (sentence, run.scored)
    store = Store(path, header, {"machine": machine(), "notes": notes})
    measure_each(chosen, run.measure, store, progress)
    return Evaluation(wanted, tuple(chosen), store.records, notes)


class _Run:
    """A model and what it is judged by."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        texts: list[str],
        calibration_texts: list[str],
        progress: bool,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._calibration_texts, self._progress = calibration_texts, progress
        self._writer = Writer(tokenizer, texts)
        ids = [torch.tensor(self._writer.ids(text)) for text in texts]
        self._batches = text_batches(ids, self._writer.start, settings)
        self._reference = Reference(model, self._batches, settings.prompt)

    @property
    def scored(self) -> str:
        """What is scored, as a sentence."""
        texts = torch.cat([b.texts[b.lengths > 0] for b in self._batches])
        lengths = torch.cat([b.lengths[b.lengths > 0] for b in self._batches])
        prompt = self._settings.prompt
        return (
            f"{int((lengths - prompt).sum()):,} tokens scored, in {len(texts)} pieces of "
            f"{len(texts.unique())} texts, behind a prompt of {prompt}"
        )

    @cached_property
    def _samples(self) -> dict[int, list[Sample]]:
        lengths = (self._settings.lengths or ()) if self._settings.tasks else ()
        return {length: self._writer.samples(self._settings, length) for length in lengths}

    def measure(self, name: str, planner: Recipe | Plan | None, store: Store) -> None:
        """Makes the measurements of a recipe that there are no records of."""
        scores = not store.done(recipe=name, task=QUALITY)
        todo = {
            length: [
                s
                for s in samples
                if not store.done(recipe=name, task=s.task, seed=s.seed, length=length)
            ]
            for length, samples in self._samples.items()
        }
        if not scores and not any(todo.values()):
            return
        model = self._model
        if planner is not None:
            texts, more = self._calibration_texts, self._settings
            model = compiled_twin(model, planner, self._tokenizer, texts, more, self._progress)
        chooser = self._chooser(planner)
        if scores:
            found = {"skipped": "needs a question"} if chooser else self._quality(name, model)
            store.add({"recipe": name, "task": QUALITY, **found})
        for length, samples in todo.items():
            for record in self._answered(name, model, length, samples, chooser) if samples else ():
                store.add(record)

    def _chooser(self, planner: Recipe | Plan | None) -> Chooser | None:
        """For a recipe that asks for chunk bits: those of its own search for each question."""
        search = getattr(planner, "chunk_bits", None)
        if search is None:
            return None
        encoder, first = TokenEmbeddings(self._model, self._tokenizer), len(self._writer.start)

        def choose(documents: Tensor, questions: Sequence[Tensor]) -> AbstractContextManager[None]:
            texts = [self._tokenizer.decode(ids) for ids in questions]
            own = {"encoder": encoder, "tokenizer": self._tokenizer, "starts": first}
            return use(search(documents[:, first:], texts, **own))

        return choose

    @torch.no_grad()
    def _quality(self, name: str, model: Any) -> Record:
        """`SUMS` by text and bucket, and the size of the cache behind the longest texts."""
        start, prompt = time.perf_counter(), self._settings.prompt
        texts = 1 + max(int(batch.texts.max()) for batch in self._batches)
        buckets = len(self._settings.edges) - 1
        sums, size = torch.zeros(texts, buckets, len(SUMS), dtype=torch.float64), Record()
        for number, batch in enumerate(self._batches):
            pairs = self._pairs(model, number, size)
            steps = batch.ids.shape[1] - prompt
            bar = tqdm(pairs, f"{name}: texts", steps, False, disable=not self._progress)
            own = batch_sums(bar, batch, prompt, self._settings.edges)
            sums.index_add_(0, batch.texts, own)
        return {"sums": sums.tolist(), "seconds": time.perf_counter() - start, **size}

    def _pairs(self, model: Any, number: int, size: Record) -> Iterator[tuple[Tensor, Tensor]]:
        """Log-probabilities of the plain model and of ``model``, then `cache_size` of the latter if
        it is not known."""
        expected = self._reference(number)
        if model is self._model:
            yield from ((p, p) for p in expected)
            size.update(self._reference.size)
            return
        ids, held = self._batches[number].ids.to(model.device), None
        own = predictions(model, ids, self._settings.prompt)
        for plain, (_, found, cache) in zip(expected, own, strict=True):
            held = cache
            yield plain, found
        size.update(size or cache_size(held))

    def _answered(
        self, name: str, model: Any, length: int, samples: list[Sample], chooser: Chooser | None
    ) -> Iterator[Record]:
        """Records of tasks and seeds at a length."""
        start, batch = time.perf_counter(), len(self._batches[0].ids)
        label = f"{name}: tasks, {length} tokens" if self._progress else None
        found, cache = answers(model, self._tokenizer, samples, batch, chooser, label)
        more = {"seconds_of_length": time.perf_counter() - start, **cache_size(cache)}
        pairs = zip(samples, found, strict=True)
        for (task, seed), own in groupby(pairs, lambda pair: (pair[0].task, pair[0].seed)):
            rows = [{"depth": s.depth, "answers": list(map(asdict, all_))} for s, all_ in own]
            key = {"recipe": name, "task": task, "seed": seed, "length": length}
            yield {**key, "samples": rows, **more}


def planners(recipes: Sequence[str]) -> dict[str, Recipe | Plan]:
    """Recipes and plans by what a command line calls them.

    Raises:
        OptionError: if one is unknown, or is the plain model.
        PlanError: if the file of a plan cannot be read.
    """
    if PLAIN in recipes:
        raise OptionError(f"Recipe {shown(PLAIN)} is always measured; name the others.")
    return {name: written_planner(name) for name in recipes}


def is_calibrated(planner: Recipe | Plan) -> TypeGuard[Recipe]:
    """Whether it has to see texts first."""
    return isinstance(planner, Recipe) and planner.calibrated


def compiled_twin(
    model: Any,
    planner: Recipe | Plan,
    tokenizer: Any,
    texts: Sequence[str],
    settings: Settings,
    progress: bool,
) -> Any:
    """A copy of the model, with the same weights, that is compiled with a recipe; ``texts`` are for
    one that is calibrated."""
    if is_calibrated(planner):
        more: dict[str, Any] = {"tokenizer": tokenizer, "progress": progress}
        planner = calibrate(model, planner, texts, samples=settings.samples, **more)
    # Dynamo counts the graphs of all models of one class together, and stops at eight.
    torch.compiler.reset()
    twin = copy.copy(model)
    twin.compile(backend="kvpass", options={"recipe": planner, "inner": settings.inner})
    return twin


def measure_each(
    chosen: Mapping[str, Recipe | Plan],
    measure: Callable[[str, Recipe | Plan | None, Store], None],
    store: Store,
    progress: bool,
) -> None:
    """Measures the plain model, then each recipe; one that fails has a record with its problem."""
    for name, planner in tqdm({PLAIN: None, **chosen}.items(), "recipes", disable=not progress):
        try:
            measure(name, planner, store)
        except Exception as error:
            if planner is None:
                raise
            problem = cut(str(error)) or type(error).__name__
            store.add({"recipe": name, "task": "all", "problem": problem})


def digest(value: Any) -> str:
    """A short name of what JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
