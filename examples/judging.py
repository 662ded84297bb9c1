"""Plans beside each other on the larger model, judged as `kvpass eval` judges recipes.

Plans and measurements are kept in a folder: what is there is not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

import kvpass
from examples.quickstart import LARGER_MODEL, load
from examples.small_model_data import held_out_files, read_texts, training_files
from kvpass.evaluate import Settings, evaluate
from kvpass.evaluate.estimates import Estimate
from kvpass.evaluate.report import perplexity_cell
from kvpass.evaluate.results import Results
from kvpass.evaluate.runner import PLAIN


def add_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    """Adds the options of a `Judge`."""
    parser.add_argument("--folder", default=folder, help="of plans and measurements")
    parser.add_argument("--samples", type=int, default=64, help="calibration texts")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens to score at least")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text at most")


def bits_of(plan: kvpass.Plan, config: Any) -> float:
    """Bits per element of packed tokens, a mean over the layers' keys and values."""
    layers = [plan.layer_at(i) for i in range(config.num_hidden_layers)]
    codecs = [tensor.codec for layer in layers for tensor in (layer.keys, layer.values)]
    shape = (config.head_dim, config.num_key_value_heads)
    return sum(codec.bits_per_element(*shape) for codec in codecs) / len(codecs)


class Judged:
    """What plans cost: bits, and divergence in thousandths of a nat per token.

    Attributes:
        plans: by name.
        config: of the model.
        packed: bits per element of packed tokens, by the plan's name.
        found: the measurements, of the plans' files.
    """

    def __init__(
        self,
        plans: Mapping[str, kvpass.Plan],
        files: Mapping[str, str],
        found: Results,
        config: Any,
    ) -> None:
        self._files, self.found = files, found
        self.plans, self.config = plans, config
        self.packed = {name: bits_of(plan, config) for name, plan in plans.items()}

    def divergence(
        self, name: str, bucket: int | None = None, against: str | None = None
    ) -> Estimate:
        """See `Results.mean`."""
        other = None if against is None else self._files[against]
        return 1000 * self.found.mean(self._files[name], "kl", bucket, other)

    @property
    def depths(self) -> list[str]:
        """Tokens of context that the columns of `cells` are for."""
        return [f"{first}-{last}" for first, last in pairwise(self.found.settings.edges)]

    def cells(self, name: str) -> list[str]:
        """Divergence in all and by depth, with standard errors."""
        buckets = (None, *range(len(self.depths)))
        return [f"{self.divergence(name, bucket):.2f}" for bucket in buckets]

    def table(self) -> str:
        """A line for each plan, as they were given, and for none; with the paired difference of
        each from the one above it."""
        lines = [line("", ["bits", "divergence", *self.depths, "from above", "perplexity"])]
        for name, above in zip(self.packed, [None, *self.packed], strict=False):
            apart = "" if above is None else f"{self.divergence(name, against=above):.2f}"
            told = f"  {perplexity_cell(self.found, self._files[name])}"
            lines.append(line(name, [f"{self.packed[name]:.3f}", *self.cells(name), apart, told]))
        return "\n".join([*lines, f"plain: perplexity {perplexity_cell(self.found, PLAIN)}"])


View = TypeVar("View", bound=Judged)


def line(name: str, cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"{name:36}" + "".join(f"{cell:>15}" for cell in cells)


class Judge:
    """The larger model, what plans are calibrated on, and a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.tokenizer = load(str(LARGER_MODEL), "float32")
        self.samples = args.samples
        self._settings = Settings(tasks=(), tokens=args.tokens, length=args.length)
        self._folder = Path(args.folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> str:
        """Where the plan of that name is, or will be."""
        return str(self._folder / f"{name}.safetensors")

    @cached_property
    def texts(self) -> list[str]:
        """What plans are calibrated on: as many as samples, or some more."""
        files = training_files()
        return list(read_texts(files[:: max(1, len(files) // self.samples)]))

    def plan(self, recipe: kvpass.Recipe) -> kvpass.Plan:
        """The recipe's plan, calibrated if it asks for that."""
        if not recipe.calibrated:
            return recipe.plan(self.model.config)
        more: dict[str, Any] = {"tokenizer": self.tokenizer, "samples": self.samples}
        return kvpass.calibrate(self.model, recipe, self.texts, **more)

    def has(self, name: str) -> bool:
        """Whether the plan of that name is in the folder."""
        return Path(self.file(name)).exists()

    def load(self, names: Iterable[str]) -> dict[str, kvpass.Plan]:
        """The plans of these names, from the folder."""
        return {name: kvpass.Plan.load(self.file(name)) for name in names}

    def plans(
        self, rows: Sequence[tuple[str, kvpass.Recipe | kvpass.Plan]]
    ) -> dict[str, kvpass.Plan]:
        """Plans by name, from the folder or else into it; a recipe that does not fit the model is
        left out, and says why."""
        for name, row in tqdm(rows, "plans", leave=False):
            if self.has(name):
                continue
            try:
                plan = row if isinstance(row, kvpass.Plan) else self.plan(row)
            except kvpass.KvpassError as error:
                tqdm.write(f"{name}: {error}")
            else:
                plan.save(self.file(name))
        return self.load(name for name, _ in rows if self.has(name))

    def judge(self, plans: Mapping[str, kvpass.Plan], view: type[View]) -> View:
        """Measures plans that are in the folder on files that the model has never seen."""
        files, texts = {name: self.file(name) for name in plans}, read_texts(held_out_files())
        measured = str(self._folder / "measured.jsonl")
        given = self.model, self.tokenizer, list(files.values()), texts, self._settings
        found = Results(evaluate(*given, path=measured))
        return view(plans, files, found, self.model.config)
