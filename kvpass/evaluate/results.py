"""What records say: sums over texts, and answers beside those of the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvpass.evaluate.depth import SUMS
from kvpass.evaluate.estimates import Estimate, Ranked, estimate, ranking
from kvpass.evaluate.runner import PLAIN, QUALITY, Evaluation
from kvpass.evaluate.store import Record


@dataclass(frozen=True)
class Answered:
    """The answers to one document, or means over their questions.

    Attributes:
        right: share of questions that are answered.
        logprob: of the right answers, mean in nats per token.
    """

    right: float
    logprob: float


class Results:
    """The measurements of an evaluation by recipe."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.settings, self.recipes = evaluation.settings, evaluation.recipes
        names = (PLAIN, *self.recipes)
        self.records = [r for r in evaluation.records if r["recipe"] in names]

    @cached_property
    def quality(self) -> dict[str, Record]:
        """Of each recipe whose predictions were measured."""
        return {r["recipe"]: r for r in self.records if r["task"] == QUALITY and "sums" in r}

    @cached_property
    def skipped(self) -> dict[str, str]:
        """Recipes without predictions to measure, and why."""
        return {r["recipe"]: r["skipped"] for r in self.records if "skipped" in r}

    @cached_property
    def problems(self) -> dict[str, str]:
        """Recipes that failed, and why."""
        return {r["recipe"]: r["problem"] for r in self.records if "problem" in r}

    def sums(self, recipe: str, measure: str) -> Tensor:
        """What a measure of `SUMS` adds up to by text and bucket ``[N, buckets]``."""
        return torch.tensor(self.quality[recipe]["sums"])[..., SUMS.index(measure)]

    def mean(self, recipe: str, measure: str, bucket: int | None = None) -> Estimate:
        """Per token, in one bucket or in all."""
        parts = (self.sums(recipe, name) for name in (measure, "tokens"))
        return estimate(*(x.sum(1) if bucket is None else x[:, bucket] for x in parts))

    def change(self, recipe: str, measure: str, bucket: int | None = None) -> Estimate:
        """The change per token against the plain model, paired."""
        a, b, tokens = (self.sums(*of) for of in
                        ((recipe, measure), (PLAIN, measure), (PLAIN, "tokens")))  # fmt: skip
        return estimate(*(x.sum(1) if bucket is None else x[:, bucket] for x in (a - b, tokens)))

    @cached_property
    def ranks(self) -> list[Ranked]:
        """All recipes by their divergence from the plain model."""
        totals = {name: self.sums(name, "kl").sum(1) for name in self.quality if name != PLAIN}
        return ranking(totals, self.sums(PLAIN, "tokens").sum(1)) if totals else []

    @cached_property
    def order(self) -> list[str]:
        """The plain model, the recipes by rank, and those that have none."""
        ranked = [PLAIN, *(r.name for r in self.ranks)]
        return ranked + [name for name in self.recipes if name not in ranked]

    def answered(self, recipe: str, task: str) -> dict[tuple[int, int, float | None], Answered]:
        """By length, seed and depth of the document."""
        return {
            (record["length"], record["seed"], sample["depth"]): _mean(sample["answers"])
            for record in self.records
            if (record["recipe"], record["task"]) == (recipe, task) and "samples" in record
            for sample in record["samples"]
        }

    def answers_change(self, recipe: str, task: str) -> tuple[Estimate, Estimate]:
        """The change against the plain model, paired by document: of the share of right answers,
        and of their log-probability."""
        found, plain = self.answered(recipe, task), self.answered(PLAIN, task)
        pairs = [(found[key], plain[key]) for key in found.keys() & plain.keys()]
        ones = torch.ones(len(pairs))
        right, logprob = (
            torch.tensor([getattr(a, name) - getattr(b, name) for a, b in pairs])
            for name in ("right", "logprob")
        )
        return estimate(right, ones), estimate(logprob, ones)

    def size(self, recipe: str) -> tuple[int, float, int] | None:
        """Bytes of a sequence, bits per element and tokens of the longest cache there was."""
        found = [r for r in self.records if r["recipe"] == recipe and "bytes" in r]
        if not found:
            return None
        # Of texts rather than of tasks, since the former are of one length for all recipes.
        last = max(found, key=lambda r: (r["task"] == QUALITY, r["cached"]))
        return last["bytes"], last["bits"], last["cached"]


def _mean(answers: Sequence[dict[str, Any]]) -> Answered:
    right, logprob = (sum(a[name] for a in answers) / len(answers) for name in ("right", "logprob"))
    return Answered(right, logprob)
