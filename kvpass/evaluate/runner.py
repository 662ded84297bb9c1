"""`evaluate`: recipes on a user's own model, one after the other."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass._torch import is_compiled
from kvpass.bench.device import machine
from kvpass.calibration.calibrate import calibrate
from kvpass.cocktail import TokenEmbeddings, use
from kvpass.errors import OptionError, cut, shown
from kvpass.evaluate.answers import Chooser, answers
from kvpass.evaluate.depth import Reference, TextBatch, batch_sums, text_batches
from kvpass.evaluate.documents import Sample, Writer
from kvpass.evaluate.quality import cache_size, predictions
from kvpass.evaluate.settings import Settings
from kvpass.evaluate.store import Record, Store
from kvpass.fingerprint import fingerprint
from kvpass.plan import Plan
from kvpass.recipes import Recipe, written_recipe

PLAIN, QUALITY = "plain", "quality"
# Of texts without others to calibrate on, each fourth one is not scored.
_CALIBRATES = 4
# Characters that two texts may have in common by chance, a licence's first line say.
_FEW = 100


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        settings: with the lengths that were used.
        recipes: as they were written, without the plain model.
        records: of the plain model and of the recipes; the lines of the file.
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
    chosen = {name: _planner(name) for name in dict.fromkeys(recipes)}
    wanted = (settings or Settings()).of_model(model.config)
    held_out, shown_texts, notes = _split(
        texts,
        calibration_texts,
        any(isinstance(r, Recipe) and r.calibrated for r in chosen.values()),
    )
    header = {
        "settings": asdict(wanted),
        "model": _digest(fingerprint(model, [""])),
        "texts": _digest([held_out, shown_texts]),
    }
    store = Store(path, header, {"machine": machine(), "notes": notes})
    run = _Run(model, tokenizer, wanted, held_out, shown_texts, store, progress)
    for name, planner in tqdm({PLAIN: None, **chosen}.items(), "recipes", disable=not progress):
        try:
            run.measure(name, planner)
        except Exception as error:
            if planner is None:
                raise
            problem = cut(str(error)) or type(error).__name__
            store.add({"recipe": name, "task": "all", "problem": problem})
    return Evaluation(wanted, tuple(chosen), store.records, (*notes, *run.notes))


class _Run:
    """A model, what it is judged by, and what is known of it so far."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Settings,
        texts: Sequence[str],
        calibration_texts: Sequence[str],
        store: Store,
        progress: bool,
    ) -> None:
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._calibration_texts, self._store, self._progress = calibration_texts, store, progress
        self._writer = Writer(tokenizer, texts)
        ids = [torch.tensor(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]
        assert settings.length is not None
        sizes = (settings.prompt, settings.length, settings.tokens, settings.batch)
        self._batches = text_batches(ids, self._writer.start, *sizes)
        self._reference = Reference(model, self._batches, settings.prompt)

    @property
    def notes(self) -> list[str]:
        """What was scored."""
        pieces = torch.cat([b.texts[b.lengths > 0] for b in self._batches])
        scored = sum(int((b.lengths - self._settings.prompt).clamp_min(0).sum())
                     for b in self._batches)  # fmt: skip
        return [
            f"{scored:,} tokens scored, in {len(pieces)} pieces of {len(pieces.unique())} texts, "
            f"behind a prompt of {self._settings.prompt}"
        ]

    @cached_property
    def _samples(self) -> dict[int, list[Sample]]:
        lengths = self._settings.lengths or ()
        return {n: self._writer.samples(self._settings, n) for n in lengths if self._settings.tasks}

    def measure(self, name: str, planner: Recipe | Plan | None) -> None:
        """Makes the measurements of a recipe that there are no records of."""
        todo = {length: self._pending(name, own) for length, own in self._samples.items()}
        scores = not self._store.done(name, QUALITY)
        if not scores and not any(todo.values()):
            return
        model = self._model if planner is None else self._compiled(planner)
        chooser = self._chooser(planner)
        if scores:
            self._store.add({"recipe": name, "task": QUALITY} | (
                {"skipped": "needs a question"} if chooser else self._quality(name, model)
            ))  # fmt: skip
        for length, samples in todo.items():
            if samples:
                self._answer(name, model, length, samples, chooser)

    def _pending(self, name: str, samples: Sequence[Sample]) -> list[Sample]:
        return [
            s for s in samples
            if not self._store.done(name, s.task, seed=s.seed, length=s.length)
        ]  # fmt: skip

    def _compiled(self, planner: Recipe | Plan) -> Any:
        """The model with that recipe, calibrated if need be; the weights are shared."""
        if isinstance(planner, Recipe) and planner.calibrated:
            planner = calibrate(
                self._model,
                planner,
                self._calibration_texts,
                tokenizer=self._tokenizer,
                samples=self._settings.samples,
                progress=self._progress,
            )
        # Dynamo counts the graphs of all models of one class together, and stops at eight.
        torch.compiler.reset()
        twin = copy.copy(self._model)
        options = {"recipe": planner, "inner": self._settings.inner}
        twin.compile(backend="kvpass", options=options)
        return twin

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
        """`SUMS` by text and bucket, and the size of the cache at the end."""
        start, edges, prompt = time.perf_counter(), self._settings.edges, self._settings.prompt
        texts = 1 + max(int(b.texts.max()) for b in self._batches)
        sums = torch.zeros(texts, len(edges) - 1, 4, dtype=torch.float64)
        size: dict[str, Any] = {}
        for number, batch in enumerate(self._batches):
            pairs = self._pairs(model, number, batch, size)
            steps = batch.ids.shape[1] - prompt
            bar = tqdm(pairs, f"{name}: texts", steps, False, disable=not self._progress)
            sums.index_add_(0, batch.texts, batch_sums(bar, batch, prompt, edges))
        return {
            "sums": sums.tolist(),
            "seconds": time.perf_counter() - start,
            **size,
        }

    def _pairs(
        self, model: Any, number: int, batch: TextBatch, size: Record
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Log-probabilities of the plain model and of ``model``, then `cache_size` of the latter
        behind the first batch, whose texts are the longest."""
        expected = self._reference(number)
        if model is self._model:
            yield from ((p, p) for p in expected)
            size.update(self._reference.size)
            return
        held = None
        own = predictions(model, batch.ids.to(model.device), self._settings.prompt)
        for plain, (_, found, cache) in zip(expected, own, strict=True):
            held = cache
            yield plain, found
        if not size:
            size.update(cache_size(held))

    def _answer(
        self, name: str, model: Any, length: int, samples: Sequence[Sample], chooser: Chooser | None
    ) -> None:
        """Records of all tasks and seeds at a length."""
        start, batch = time.perf_counter(), self._settings.batch
        label = f"{name}: tasks, {length} tokens" if self._progress else None
        found, cache = answers(model, self._tokenizer, samples, batch, chooser, label)
        of_length = {"seconds_of_length": time.perf_counter() - start, **cache_size(cache)}
        pairs = zip(samples, found, strict=True)
        for (task, seed), own in groupby(pairs, lambda p: attrgetter("task", "seed")(p[0])):
            rows = [{"depth": s.depth, "answers": [asdict(a) for a in all_]} for s, all_ in own]
            of_seed = {"recipe": name, "task": task, "seed": seed, "length": length}
            self._store.add({**of_seed, "samples": rows, **of_length})


def _planner(name: str) -> Recipe | Plan:
    if name == PLAIN:
        raise OptionError(
            f"Recipe {shown(name)} is not supported: the plain model is always there."
        )
    return Plan.load(name) if name.endswith(".safetensors") else written_recipe(name)


def _split(
    texts: Iterable[Any], calibration_texts: Iterable[Any] | None, calibrates: bool
) -> tuple[list[str], list[str], list[str]]:
    """Texts to score, texts to calibrate on, and how they were told apart."""
    held_out = list(map(_text, texts))
    if calibration_texts is None:
        if not calibrates:
            return held_out, [], []
        own = held_out[_CALIBRATES - 1 :: _CALIBRATES]
        if not own:
            raise OptionError(
                f"Calibrated recipes need texts of their own: of {len(held_out)} texts none can be "
                f"spared; give calibration texts, or {_CALIBRATES} texts at least."
            )
        del held_out[_CALIBRATES - 1 :: _CALIBRATES]
        note = f"each fourth text ({len(own)}) is for calibration, and not scored"
    else:
        own = list(map(_text, calibration_texts))
        note = f"calibrated on {len(own)} other texts"
    for text in own:
        if any(_overlap(text, other) for other in held_out):
            raise OptionError(
                f"Calibration text {shown(text)} is also held out, or part of a text that is: what "
                "is scored must not be calibrated on."
            )
    return held_out, own, [note]


def _overlap(a: str, b: str) -> bool:
    """Whether one is part of the other, and more than a few words."""
    shorter, longer = sorted((a.strip(), b.strip()), key=len)
    return len(shorter) > _FEW and shorter in longer


def _text(item: Any) -> str:
    text = item.get("text") if isinstance(item, Mapping) else item
    if not isinstance(text, str):
        raise OptionError(f"{shown(item)} is no text; allowed: a text, or a mapping with 'text'.")
    return text


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
