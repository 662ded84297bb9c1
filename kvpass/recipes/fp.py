"""The identity recipe: a packed cache in the model's own dtype. For tests and as a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.plan import LayerPlan
from kvpass.recipes.base import Recipe


@dataclass(frozen=True)
class Fp(Recipe):
    """Stores keys and values as they are."""

    @property
    def name(self) -> str:
        """``fp``."""
        return "fp"

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The identity."""
        return LayerPlan()
