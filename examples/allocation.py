"""Bits by layer: recipes of one method, KVmix, and the mixtures that budgets allow.

    python -m examples.allocation                  # about 7 minutes on 2 cores

Calibrates and measures as `examples.skvq_ablation` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

import kvpass
from examples.skvq_ablation import HEADER, Bench, add_arguments
from kvpass.recipes import Auto


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bits by layer, from a budget.")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.25, 2.5, 3.0, 4.0])
    parser.add_argument("--by", default="sensitivity", help="or importance, or loss")
    add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each recipe, and one for each budget."""
    args = arguments(argv)
    torch.manual_seed(0)
    bench = Bench(args)
    bench.show_plain()
    print(HEADER, flush=True)
    for share in (0.2, 0.3):
        plan = bench.plan(kvpass.recipe("kvmix", share=share))
        tqdm.write(str(bench.row(plan.recipe, plan)))
    plans = []
    recipes = Auto().candidates(bench.model.config.head_dim)
    for recipe in tqdm(recipes, desc="recipes", leave=False):
        plans.append(bench.plan(recipe))
        tqdm.write(str(bench.row(recipe.name, plans[-1])))
    scores = kvpass.score(
        bench.model,
        plans,
        bench.training_texts(),
        by=args.by,
        tokenizer=bench.tokenizer,
        samples=args.samples,
    )
    for budget in args.budgets:
        found = kvpass.allocate(scores, budget_bits=budget)
        tqdm.write(str(bench.row(f"auto, {budget} bits", found.plan)))


if __name__ == "__main__":
    main()
