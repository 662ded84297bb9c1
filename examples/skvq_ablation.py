"""What each part of SKVQ is worth on the small model: the ablation of the paper's table 3.

    python -m examples.skvq_ablation               # about 15 minutes on 2 cores

Calibrates on files the model was trained on, and measures perplexity and recall on files and
documents that it has never seen, through a cache that is rounded as the packed one is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

import kvpass
from examples.judging import bits_of, made_plan, training_texts
from examples.quickstart import SMALL_MODEL, held_out_ids, load, recall_prompt
from kvpass.evaluate import perplexity, recall_accuracy

# Every step keeps what those before it have added.
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RTN", {"window": 0, "sinks": 0, "fp8": False, "clip": False, "reorder": False}),
    ("+ window", {"window": 128}),
    ("+ clip", {"clip": True}),
    ("+ reorder", {"reorder": "balanced"}),
    ("+ sinks", {"sinks": 5}),
    ("+ fp8", {"fp8": True}),
)
PROMPT, SCORED = 1024, 128
HEADER = f"{'':16}{'bits':>8}{'perplexity':>12}{'recall':>9}"


@dataclass(frozen=True)
class Row:
    """One line of the table: bits per element of packed tokens, and what they cost."""

    name: str
    bits: float
    perplexity: float
    recall: float

    def __str__(self) -> str:
        return f"{self.name:16}{self.bits:>8.3f}{self.perplexity:>12.3f}{self.recall:>9.1%}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What each part of SKVQ is worth.")
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 128])
    add_arguments(parser)
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `Bench`."""
    parser.add_argument("--samples", type=int, default=64, help="calibration texts")
    parser.add_argument("--texts", type=int, default=8, help="held-out texts")
    parser.add_argument("--documents", type=int, default=2, help="of 24 recall questions each")


class Bench:
    """A model, what it is calibrated on and what it is judged by."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.tokenizer = load(str(SMALL_MODEL), "float32")
        self._samples, self._training = args.samples, training_texts(args.samples)
        self.texts = held_out_ids(self.tokenizer, PROMPT + SCORED, args.texts)
        self.recall = [
            recall_prompt(self.tokenizer, PROMPT, 24, seed) for seed in range(args.documents)
        ]

    def show_plain(self) -> None:
        """Prints what the plain cache gives."""
        plain = self.row("", None)
        print(f"plain: perplexity {plain.perplexity:.3f}, recall {plain.recall:.1%}", flush=True)

    def plan(self, recipe: kvpass.Recipe) -> kvpass.Plan:
        """See `made_plan`; says how long calibrating takes."""
        start = time.perf_counter()
        plan = made_plan(recipe, self.model, self.tokenizer, self._training, self._samples)
        if recipe.calibrated:
            tqdm.write(f"{'':16}calibrated in {time.perf_counter() - start:.0f} s")
        return plan

    def row(self, name: str, plan: kvpass.Plan | None) -> Row:
        """What a plan costs; None: nothing is rounded."""

        def new_cache() -> Any:
            assert plan is not None
            return kvpass.oracle_cache(plan, self.model.config, self.model)

        cache = None if plan is None else new_cache
        return Row(
            name,
            16.0 if plan is None else bits_of(plan, self.model.config),
            perplexity(self.model, self.texts, PROMPT, cache),
            recall_accuracy(self.model, self.recall, cache),
        )


def recipes(group: int) -> list[tuple[str, kvpass.Recipe]]:
    """The steps with groups of so many channels, and what they are compared with."""
    fields: dict[str, Any] = {"group": group}
    found: list[tuple[str, kvpass.Recipe]] = []
    for name, change in STEPS:
        fields |= change
        found.append((name, kvpass.recipe("skvq-k2v2", **fields)))
    unequal = kvpass.recipe("skvq-k2v2", **fields | {"reorder": "clusters"})
    before = kvpass.recipe("skvq-k2v2", **fields, before_rope=True)
    kivi = kvpass.recipe("kivi-2bit", group=group)
    return [*found, ("before RoPE", before), ("unequal groups", unequal), ("kivi-2bit", kivi)]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each size of groups."""
    args = arguments(argv)
    torch.manual_seed(0)
    bench = Bench(args)
    bench.show_plain()
    for group in args.groups:
        print(f"\ngroup {group}\n{HEADER}", flush=True)
        for name, recipe in tqdm(recipes(group), desc=f"group {group}", leave=False):
            try:
                row = bench.row(name, bench.plan(recipe))
            except kvpass.KvpassError as error:
                tqdm.write(f"{name:16}{error}")
                continue
            tqdm.write(str(row))


if __name__ == "__main__":
    main()
