"""The best of all methods, layer by layer, within a budget of bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from kvpass.calibration.samples import STORED, CalibrationRunner, Shape, Stored, layer_shapes
from kvpass.errors import PlanError, check, check_flag, is_number
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import CalibratedRecipe, Recipe, fitted
from kvpass.recipes.kivi import Kivi
from kvpass.recipes.kvquant import Kvquant, fit_together
from kvpass.recipes.rotated import Rotated
from kvpass.recipes.skvq import Skvq


@dataclass(frozen=True)
class Auto(CalibratedRecipe):
    """Mixes KIVI's, SKVQ's, KVQuant's and rotated ways to store keys and values, those with the
    least predicted cost (by sensitivity) that keep the budget.

    Attributes:
        budget: bits per element at most, a mean over keys and values of all layers; exact tokens
            are not counted.
        window: last tokens that stay exact; KIVI's keys: up to so many.
        sinks: first tokens that stay exact, except with KIVI.
        before_rope: keys may be stored before their rotary embedding, as KVQuant has them; without,
            KVQuant is no candidate (packed pages hold no such keys).
    """

    name: ClassVar[str] = "auto"

    budget: float = 2.5
    window: int = 128
    sinks: int = 5
    before_rope: bool = True

    def __post_init__(self) -> None:
        check_flag("before_rope", self.before_rope)
        fits = is_number(self.budget) and 0 < self.budget <= 16
        check("budget", self.budget, fits, "bits, above 0, at most 16")
        # Checks window and sinks.
        _ = Kvquant(window=self.window, sinks=self.sinks)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Fits every candidate, scores all of them in one pass, and allocates."""
        # These import solvers that only this recipe needs.
        from kvpass.calibration.allocation import allocate
        from kvpass.calibration.scores import score_run

        shapes = layer_shapes(run)
        scores = score_run(run, shapes, self.fitted(run, shapes, seed), "sensitivity")
        plan = allocate(scores, budget_bits=self.budget).plan
        return replace(plan, recipe=self.name)

    def fitted(self, run: CalibrationRunner, shapes: Mapping[str, Shape], seed: int) -> list[Plan]:
        """The plans of those `candidates` that fit a model of these layers.

        Raises:
            PlanError: if none does.
        """
        plans: list[Plan] = []
        kvquant: list[Kvquant] = []
        for recipe in self.candidates(min(min(dims) for _, *dims in shapes.values())):
            # Some may not fit these heads.
            with suppress(PlanError):
                if isinstance(recipe, Kvquant):
                    recipe.sized(shapes)
                    kvquant.append(recipe)
                else:
                    plans.append(fitted(recipe, run, shapes, seed))
        # There may be no keys before a rotary embedding.
        with suppress(PlanError):
            plans += fit_together(kvquant, run, seed) if kvquant else []
        if not plans:
            raise PlanError("No recipe fits this model.")
        return plans

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """See `Recipe.sized`: SKVQ's formats in 2, 3 and 4 bits, whose mean comes as near to the
        budget as it can without exceeding it, the first layers in the most bits."""
        dim = min(min(dims) for _, *dims in shapes.values())
        ways = [r.sized(shapes).layers for r in self.candidates(dim) if isinstance(r, Skvq)]

        def bits(layer: LayerPlan, path: str, kind: Stored) -> float:
            heads, *dims = shapes[path]
            channels = dims[STORED.index(kind)]
            codec = layer.stored(kind)[0].codec
            return heads * channels * codec.bits_per_element(channels, heads)

        tensors = list(product(shapes, STORED))
        layers = dict(ways[0])
        left = self.budget * sum(heads * sum(dims) for heads, *dims in shapes.values())
        left -= sum(bits(layers[path], path, kind) for path, kind in tensors)
        if left < 0:
            raise PlanError(f"budget={self.budget} cannot be kept: 2 bits with scales exceed it.")
        for way, (path, kind) in product(ways[1:], tensors):
            more = bits(way[path], path, kind) - bits(layers[path], path, kind)
            if more <= left:
                layers[path] = replace(layers[path], **{kind: getattr(way[path], kind)})
                left -= more
        return Plan(layers=layers, recipe=self.name)

    def candidates(self, dim: int) -> Sequence[Recipe]:
        """The recipes to choose from, for heads of at least ``dim`` channels."""
        group = math.gcd(128, dim)
        # KIVI packs the window's tokens at once, in whole groups.
        groups = [g for g in (group // 2, group) if self.window and self.window % g == 0]
        same: dict[str, Any] = {"window": self.window, "sinks": self.sinks}
        kvquant = [Kvquant(b, outliers, **same) for b in (2, 3, 4) for outliers in (0.0, 0.01)]
        return [
            *(Kivi(b, g, self.window) for b in (2, 4) for g in groups),
            *(Skvq(b, b, group, **same) for b in (2, 3, 4)),
            *(Rotated(b, b, "token", None, "eigen", "eigen", clip=True, **same) for b in (2, 3, 4)),
            *(kvquant if self.before_rope else ()),
        ]
