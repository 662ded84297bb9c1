"""What a recipe is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from kvpass.calibration.samples import CalibrationRunner
from kvpass.errors import PlanError
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan


@dataclass(frozen=True)
class Recipe(ABC):
    """Makes a `Plan`. A recipe is a frozen dataclass; its fields are the options a user can
    override.

    Attributes:
        renamed: former names of its options, which are understood for one release.
    """

    renamed: ClassVar[dict[str, str]] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """As a user writes it, e.g. ``kivi-2bit``."""

    @abstractmethod
    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan of one layer.

        Args:
            path: of the attention module, e.g. ``model.layers.0.self_attn``.
            key_dim, value_dim: channels per head.

        Raises:
            PlanError: if the options do not fit these heads.
        """

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """The plan of a cache tensor of ``dim`` channels that is neither keys nor values of a known
        attention: by default that of values, see `LayerPlan.unknown`.

        Raises:
            PlanError: if ``dim`` channels cannot be stored so.
        """
        return self.layer_plan(path, dim, dim).unknown(path, dim)

    @property
    def calibrated(self) -> bool:
        """Whether it needs to see texts: its plans are made by `kvpass.calibrate`."""
        return False

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """The plan of a calibrated recipe: its layers by their paths, and a default for cache
        tensors that no known attention reads.

        Args:
            run: runs the model over the texts once, an observer looking on; as often as wanted.
            seed: of whatever is drawn.
        """
        raise NotImplementedError

    def warning(self, query_heads: int, kv_heads: int) -> str | None:
        """Why this recipe may lose accuracy on a layer with these heads, or None."""
        return None

    def plan(self, config: Any) -> Plan:
        """The plan for a model with this transformers config: uniform over the layers, unless the
        config gives layers head dimensions of their own.

        Raises:
            PlanError: if the options do not fit the model, or the recipe is calibrated.
        """
        text = config.get_text_config(decoder=True)
        if getattr(text, "is_heterogeneous", False):
            dims = [_head_dim(layer) for layer in text.per_layer_config]
            layers = {str(i): self.layer_plan(str(i), dim, dim) for i, dim in enumerate(dims)}
            return Plan(layers=layers, recipe=self.name)
        dim = _head_dim(text)
        return Plan(self.layer_plan("*", dim, dim), recipe=self.name)


class CalibratedRecipe(Recipe):
    """A recipe that has no plan without texts, whatever its fields."""

    @property
    def calibrated(self) -> bool:
        """True."""
        return True

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """Raises:
        PlanError: there is none without calibration.
        """
        raise PlanError(
            f"Recipe '{self.name}' is calibrated: use the plan that kvpass.calibrate(model, "
            f"'{self.name}', texts) makes."
        )


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
