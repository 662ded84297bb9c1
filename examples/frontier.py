"""Bits against quality: every method, and what `auto` mixes of them for budgets of bits.

    python -m examples.frontier --plot examples/frontier.png       # half an hour on 2 cores

Calibrates on files the larger model was trained on: all candidates of `auto` are scored once, for
all budgets. Measures, as `kvpass eval` does, how far predictions on files that the model has never
seen diverge when they are read through the packed cache, token by token. Plans and measurements are
kept in a folder; what is measured there is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

import kvpass
from examples import one_sentence
from examples.judging import Judge, Judged, add_arguments, line
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.shapes import model_shape
from kvpass.evaluate.plots import front
from kvpass.recipes import Auto, Kivi, Rotated, written_recipe
from kvpass.report import check_outputs

# Beside the candidates of `auto`.
OTHERS = (
    "kivi-4bit,value_bits=2",
    "kivi-2bit,before_rope=True",
    "kivi-4bit,before_rope=True",
    "skvq-k2v1.5",
    "skvq-k2v2,group=32",
    "rotated-4bit",
    "rotated-k4v2",
    "kvmix-k2.28v2.56",
)
AUTO = "auto"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bits against quality, for every method.")
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.25, 2.5, 3.0, 4.0])
    add_arguments(parser, "frontier")
    parser.add_argument("--plot", metavar="FILE", help="draw the frontier; needs kvpass[plot]")
    return parser.parse_args(argv)


def candidates(dim: int) -> list[str]:
    """Names of what `auto` chooses from for heads of ``dim`` channels."""
    names = []
    for recipe in Auto().candidates(dim):
        more = f",group={recipe.group}" if isinstance(recipe, Kivi) else ""
        names.append(recipe.name + (",eigen" if isinstance(recipe, Rotated) else more))
    return names


def make_plans(judge: Judge, budgets: Sequence[float]) -> dict[str, kvpass.Plan]:
    """The plans of all methods, by name, and of `auto` for each budget."""
    auto, dim = kvpass.recipe(AUTO), judge.model.config.head_dim
    assert isinstance(auto, Auto)
    more = {"tokenizer": judge.tokenizer, "samples": judge.samples}
    scores = kvpass.score(judge.model, auto, judge.texts, **more)
    plans = dict(zip(candidates(dim), scores.candidates, strict=True))
    plans |= {name: judge.plan(written_recipe(name)) for name in OTHERS}
    for budget, found in zip(budgets, kvpass.cost_curve(scores, budgets), strict=True):
        plans[auto_name(budget)] = found.plan
    return plans


def auto_name(budget: float) -> str:
    """The name of `auto`'s plan for so many bits."""
    return f"{AUTO},budget={budget:g}"


def family(name: str) -> str:
    """The method that a plan's name is of."""
    return name.split(",")[0].split("-")[0]


def own_bits(cache: ModelCache, tokens: int) -> float:
    """Bits per element of a sequence of so many tokens: exact ones too, but not what is shared."""
    total, elements, shared = 0.0, 0, dict[Any, Any]()
    for kind, count in cache.tensors.items():
        held = kind.tensor(1, tokens, cache.dtype, shared)
        assert isinstance(held, kvpass.PackedKV)
        total += count * held.bits_per_element * held.numel()
        elements += count * held.numel()
    return total / elements


class Frontier(Judged):
    """What plans cost, and which cost least."""

    @property
    def cached(self) -> int:
        """Tokens of a sequence."""
        return int(next(iter(self.found.quality.values()))["cached"])

    @cached_property
    def bits(self) -> dict[str, float]:
        """Bits per element of all tokens of a sequence, exact ones in bfloat16, by the plan's name.
        What all layers share, the cosines and sines of keys before RoPE, is left out: here are few
        layers to share it."""
        dtype = torch.bfloat16
        shape = model_shape(self.config, dtype)
        caches = {n: ModelCache.packed(shape, plan, dtype) for n, plan in self.plans.items()}
        return {name: own_bits(cache, self.cached) for name, cache in caches.items()}

    def table(self) -> str:
        """A line for each plan, by its bits."""
        lines = [line("", ["packed", "all bits", "divergence", *self.depths])]
        for name in sorted(self.bits, key=self.bits.__getitem__):
            bits = f"{self.packed[name]:.3f}", f"{self.bits[name]:.3f}"
            lines.append(line(name, [*bits, *self.cells(name)]))
        return "\n".join(lines)

    def verdicts(self, budgets: Sequence[float]) -> list[str]:
        """For each budget, `auto` beside the best of the single methods that keep it."""
        lines = []
        for budget in budgets:
            own = auto_name(budget)
            rivals = [n for n in self.bits if family(n) != AUTO and self.packed[n] <= budget]
            if not rivals:
                continue
            best = min(rivals, key=lambda n: self.divergence(n).mean)
            apart = self.divergence(best, against=own)
            word = "less" if apart.mean > 0 else "more"
            lines.append(
                f"{budget:g} bits: auto {self.divergence(own):.2f}, {best} "
                f"{self.divergence(best):.2f}: {word if apart.certain else 'a tie'} by {apart:.2f}"
            )
        return lines

    def plot(self, file: str) -> None:
        """Draws bits against divergence with standard errors, and the Pareto front."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        families = dict.fromkeys(map(family, self.bits))
        for marker, method in zip("osD^vP*X", families, strict=False):
            names = [n for n in sorted(self.bits, key=self.bits.__getitem__) if family(n) == method]
            values, line = [self.divergence(n) for n in names], "-" if method == AUTO else ""
            axes.errorbar(
                [self.bits[n] for n in names], [v.mean for v in values], [v.error for v in values],
                marker=marker, linestyle=line, capsize=2, label=method,
            )  # fmt: skip
        points = [(self.bits[n], self.divergence(n).mean) for n in self.bits]
        axes.plot(*zip(*front(points), strict=True), "--", color="grey", zorder=0, label="front")
        axes.set(
            yscale="log",
            xlabel=f"bits per element of {self.cached:,} tokens, exact ones in bfloat16",
            ylabel="divergence, 0.001 nats per token",
        )
        axes.legend()
        figure.savefig(file, dpi=150)


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each plan, and how `auto` compares at each budget."""
    args = arguments(argv)
    if args.plot:
        check_outputs(None, args.plot)
    judge = Judge(args)
    names = [*candidates(judge.model.config.head_dim), *OTHERS, *map(auto_name, args.budgets)]
    if not all(map(judge.has, names)):
        for name, plan in make_plans(judge, args.budgets).items():
            plan.save(judge.file(name))
    found = judge.judge(judge.load(names), Frontier)
    print(found.table(), *found.verdicts(args.budgets), sep="\n")
    if args.plot:
        found.plot(args.plot)


if __name__ == "__main__":
    main()
