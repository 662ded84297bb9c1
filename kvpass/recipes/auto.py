"""The best of all methods, layer by layer, within a budget of bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpass.calibration.samples import CalibrationRunner, layer_dims, layer_shapes
from kvpass.errors import OptionError, PlanError, shown
from kvpass.plan import Plan
from kvpass.recipes.base import CalibratedRecipe, Recipe
from kvpass.recipes.kivi import Kivi
from kvpass.recipes.kvquant import Kvquant
from kvpass.recipes.skvq import Skvq


@dataclass(frozen=True)
class Auto(CalibratedRecipe):
    """Mixes KIVI's, SKVQ's and KVQuant's ways to store keys and values, those with the least
    predicted cost (by sensitivity) that keep the budget.

    Attributes:
        budget: bits per element at most, a mean over keys and values of all layers; exact tokens
            are not counted.
        window: last tokens that stay exact; of KIVI's keys up to so many.
        sinks: first tokens that stay exact, but with KIVI.
    """

    budget: float = 2.5
    window: int = 128
    sinks: int = 5

    def __post_init__(self) -> None:
        number = isinstance(self.budget, int | float) and not isinstance(self.budget, bool)
        if not number or not 0 < self.budget <= 16:
            raise OptionError(
                f"budget={shown(self.budget)} is not supported; allowed: bits, above 0, at most 16."
            )
        # Window and sinks are theirs to check.
        _ = Kvquant(window=self.window, sinks=self.sinks)

    @property
    def name(self) -> str:
        """``auto``."""
        return "auto"

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Fits every candidate, scores all of them in one pass, and allocates."""
        # They come with solvers that only this recipe needs.
        from kvpass.calibration.allocation import allocate
        from kvpass.calibration.scores import score_run

        dims = layer_dims(layer_shapes(run))
        candidates: list[Plan] = []
        for recipe in self.candidates(min(min(pair) for pair in dims.values())):
            try:
                plan = recipe.fit(run, seed) if recipe.calibrated else _uniform(recipe, dims)
            except PlanError:
                # Does not fit these heads, or has no keys before a rotary embedding.
                continue
            candidates.append(plan)
        if not candidates:
            raise PlanError("No recipe fits this model.")
        plan = allocate(score_run(run, candidates, "sensitivity"), budget_bits=self.budget).plan
        return replace(plan, recipe=self.name)

    def candidates(self, dim: int) -> Sequence[Recipe]:
        """For heads of at least ``dim`` channels."""
        group = math.gcd(128, dim)
        # KIVI packs the window's tokens at once, in whole groups.
        groups = [g for g in (group // 2, group) if self.window and self.window % g == 0]
        same: dict[str, Any] = {"window": self.window, "sinks": self.sinks}
        return [
            *(Kivi(b, g, self.window) for b in (2, 4) for g in groups),
            *(Skvq(b, b, group, **same) for b in (2, 3, 4)),
            *(Kvquant(b, outliers, **same) for b in (2, 3, 4) for outliers in (0.0, 0.01)),
        ]


def _uniform(recipe: Recipe, dims: dict[str, tuple[int, int]]) -> Plan:
    layers = {path: recipe.layer_plan(path, *pair) for path, pair in dims.items()}
    return Plan(recipe.layer_plan("*", *next(iter(dims.values()))), layers, recipe.name)
