"""What records say: sums over texts, and answers beside those of the plain model."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvpass.evaluate.depth import SUMS
from kvpass.evaluate.estimates import Estimate, estimate, ranking
from kvpass.evaluate.runner import PLAIN, QUALITY, Evaluation
from kvpass.evaluate.store import Record


class Results:
    """The measurements of an evaluation by recipe.

    Attributes:
        quality: the records of those whose predictions were measured.
        reasons: why the others were not.
        ranks: of all recipes, by their divergence from the plain model; see `ranking`.
        order: the plain model, the recipes by rank, and those that have none.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self.settings, names = evaluation.settings, (PLAIN, *evaluation.recipes)
        self.records = [r for r in evaluation.records if r["recipe"] in names]
        self.quality = {r["recipe"]: r for r in self.records if "sums" in r}
        self.reasons = {r["recipe"]: r["skipped"] for r in self.records if "skipped" in r} | {
            r["recipe"]: f"failed: {r['problem']}" for r in self.records if "problem" in r
        }
        totals = {name: self._sums(name, "kl").sum(1) for name in self.quality if name != PLAIN}
        self.ranks = ranking(totals, self._sums(PLAIN, "tokens").sum(1))
        self.order = list(dict.fromkeys([PLAIN, *self.ranks, *names]))

    def _sums(self, recipe: str, measure: str) -> Tensor:
        return torch.tensor(self.quality[recipe]["sums"])[..., SUMS.index(measure)]

    def mean(
        self, recipe: str, measure: str, bucket: int | None = None, against: str | None = None
    ) -> Estimate:
        """A measure of `SUMS` per token, in one bucket or in all; or how much it is above that of
        another recipe, paired."""
        totals, tokens = self._sums(recipe, measure), self._sums(recipe, "tokens")
        if against is not None:
            totals = totals - self._sums(against, measure)
        return estimate(*(x.sum(1) if bucket is None else x[:, bucket] for x in (totals, tokens)))

    @cached_property
    def _answered(self) -> dict[tuple[str, str], dict[tuple[int, int, float | None], Record]]:
        found: dict[tuple[str, str], dict[tuple[int, int, float | None], Record]] = {}
        for record in self.records:
            for sample in record.get("samples", ()):
                own = found.setdefault((record["recipe"], record["task"]), {})
                own[record["length"], record["seed"], sample["depth"]] = {
                    name: sum(answer[name] for answer in sample["answers"]) / len(sample["answers"])
                    for name in ("right", "logprob")
                }
        return found

    def answered(
        self,
        recipe: str,
        task: str,
        measure: str,
        length: int | None = None,
        depth: float | None = None,
        against: str | None = None,
    ) -> Estimate:
        """The share of questions that are answered (``right``) or the log-probability of the right
        answer in nats per token (``logprob``), mean over documents, at one length and depth or at
        all; or how much it is above that of another recipe, paired. nan without documents."""
        found, other = (
            self._answered.get((name or recipe, task), {}) for name in (recipe, against)
        )
        values = [
            found[key][measure] - (other[key][measure] if against else 0)
            for key in found.keys() & other.keys()
            if length in (None, key[0]) and depth in (None, key[2])
        ]
        return estimate(torch.tensor(values), torch.ones(len(values)))

    def size(self, recipe: str) -> Record | None:
        """The record with bytes of a sequence, bits per element and the number of cached tokens:
        that of texts, which are as long for all recipes, else the longest of tasks."""
        found = [r for r in self.records if r["recipe"] == recipe and "bytes" in r]
        return max(found, key=lambda r: (r["task"] == QUALITY, r["cached"]), default=None)
