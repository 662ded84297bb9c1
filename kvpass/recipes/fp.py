"""The identity recipe: a packed cache in the model's own dtype. For tests and as a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpass.errors import check_flag
from kvpass.plan import LayerPlan
from kvpass.recipes.base import Recipe


@dataclass(frozen=True)
class Fp(Recipe):
    """Stores keys and values as they are.

    Attributes:
        before_rope: keys are stored before their rotary embedding.
    """

    name: ClassVar[str] = "fp"

    before_rope: bool = False

    def __post_init__(self) -> None:
        check_flag("before_rope", self.before_rope)

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The identity."""
        return LayerPlan(before_rope=self.before_rope)
