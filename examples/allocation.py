"""Bits by layer: recipes of one method, KVmix, and the mixtures that budgets allow.

    python -m examples.allocation --plot examples/allocation.svg       # about 15 minutes on 2 cores

Calibrates on files the model was trained on. Measures perplexity, divergence from the model without
packing, and recall on files and documents that it has never seen, through a cache that is rounded
as the packed one is. `--random` compares KVmix's choice of layers with choices by lot.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

import kvpass
from examples.quickstart import held_out_pieces
from examples.skvq_ablation import PROMPT, SCORED, Bench, add_arguments, bits_of
from kvpass.evaluate import quality, recall_accuracy
from kvpass.recipes import Auto

HEADER = f"{'':24}{'bits':>8}{'perplexity':>12}{'divergence':>12}{'recall':>9}"
BATCH = 32


@dataclass(frozen=True)
class Row:
    """One line of the table: bits per element of packed tokens, and what they cost; divergence in
    thousandths of a nat per token."""

    name: str
    bits: float
    perplexity: float
    divergence: float
    recall: float

    def __str__(self) -> str:
        return (
            f"{self.name:24}{self.bits:>8.3f}{self.perplexity:>12.3f}{self.divergence:>12.3f}"
            f"{self.recall:>9.1%}"
        )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bits by layer, from a budget.")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.25, 2.5, 3.0, 4.0])
    parser.add_argument("--by", default="sensitivity", help="or importance, or loss")
    parser.add_argument("--random", type=int, default=10, help="choices by lot (default: 10)")
    parser.add_argument("--plot", metavar="FILE", help="draw all rows; needs matplotlib")
    add_arguments(parser)
    return parser.parse_args(argv)


def measured(bench: Bench, name: str, plan: kvpass.Plan | None) -> Row:
    """What a plan costs; None: nothing is rounded."""

    def new_cache() -> Any:
        assert plan is not None
        return kvpass.oracle_cache(plan, bench.model.config, bench.model)

    cache = None if plan is None else new_cache
    texts = held_out_pieces(bench.tokenizer, PROMPT + SCORED)
    found = quality(bench.model, texts, PROMPT, cache, batch=BATCH)
    bits = 16.0 if plan is None else bits_of(plan, bench.model.config)
    recall = recall_accuracy(bench.model, bench.recall, cache)
    row = Row(name, bits, found.perplexity, 1000 * found.divergence, recall)
    tqdm.write(str(row))
    return row


def by_lot(plan: kvpass.Plan, count: int) -> Iterator[kvpass.Plan]:
    """Plans of as many bits, whose layers have changed places at random, of keys and of values."""
    chance, names = random.Random(0), list(plan.layers)
    for _ in range(count):
        keys, values = (chance.sample(names, len(names)) for _ in range(2))
        layers = {
            name: replace(plan.layers[name], keys=plan.layers[k].keys, values=plan.layers[v].values)
            for name, k, v in zip(names, keys, values, strict=True)
        }
        yield replace(plan, layers=layers)


def compare_with_lots(bench: Bench, count: int) -> list[Row]:
    """KVmix, and the mean of as many bits in layers chosen by lot."""
    plans = [bench.plan(kvpass.recipe("kvmix", share=share)) for share in (0.2, 0.3)]
    rows = [measured(bench, plan.recipe, plan) for plan in plans]
    lots = [measured(bench, "  by lot", plan) for plan in by_lot(plans[1], count)]
    for name in ("perplexity", "divergence"):
        found, own = [getattr(row, name) for row in lots], getattr(rows[1], name)
        mean, better = sum(found) / max(1, count), sum(own < other for other in found)
        tqdm.write(f"  {name} by lot {mean:.3f}; by importance less than {better} of {count}")
    return rows


def plot(file: str, methods: dict[str, list[Row]], plain: Row) -> None:
    """Draws bits against perplexity, and against divergence."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8))
    for axes, what in zip(panels, ("perplexity", "divergence"), strict=True):
        for method, rows in methods.items():
            points = sorted((row.bits, getattr(row, what)) for row in rows)
            line = "-" if method == "auto" else ""
            axes.plot(*zip(*points, strict=True), marker="o", linestyle=line, label=method)
        axes.set_xlabel("bits per element")
    panels[0].axhline(plain.perplexity, color="gray", linewidth=1, label="not packed")
    panels[0].set_ylabel("perplexity")
    panels[1].set_yscale("log")
    panels[1].set_ylabel("divergence, 0.001 nats per token")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each recipe, and one for each budget."""
    args = arguments(argv)
    if args.plot:
        from kvpass.bench.report import check_outputs

        check_outputs(None, args.plot)
    torch.manual_seed(0)
    bench = Bench(args)
    print(HEADER, flush=True)
    plain = measured(bench, "not packed", None)
    methods = {"KVmix": compare_with_lots(bench, args.random)}
    plans = []
    recipes = Auto().candidates(bench.model.config.head_dim)
    for recipe in tqdm(recipes, desc="recipes", leave=False):
        plans.append(bench.plan(recipe))
        row = measured(bench, recipe.name, plans[-1])
        method = {"kivi": "KIVI", "skvq": "SKVQ", "kvquant": "KVQuant"}[recipe.name.split("-")[0]]
        methods.setdefault(method, []).append(row)
    scores = kvpass.score(
        bench.model,
        plans,
        bench.training_texts(),
        by=args.by,
        tokenizer=bench.tokenizer,
        samples=args.samples,
    )
    for budget in args.budgets:
        plan = kvpass.allocate(scores, budget_bits=budget).plan
        methods.setdefault("auto", []).append(measured(bench, f"auto, {budget} bits", plan))
    if args.plot:
        plot(args.plot, methods, plain)


if __name__ == "__main__":
    main()
