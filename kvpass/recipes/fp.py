"""The identity recipe: a packed cache in the model's own dtype. For tests and as a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.errors import OptionError, shown
from kvpass.plan import LayerPlan
from kvpass.recipes.base import Recipe


@dataclass(frozen=True)
class Fp(Recipe):
    """Stores keys and values as they are.

    Attributes:
        before_rope: keys are stored before their rotary embedding.
    """

    before_rope: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.before_rope, bool):
            raise OptionError(
                f"before_rope={shown(self.before_rope)} is not supported; allowed: True, False."
            )

    @property
    def name(self) -> str:
        """``fp``."""
        return "fp"

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The identity."""
        return LayerPlan(before_rope=self.before_rope)
