"""`Recipe`: what makes plans from a few options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from kvpass.calibration.samples import CalibrationRunner, Shape
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
        """The name as a user writes it, e.g. ``kivi-2bit``."""

    @abstractmethod
    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan of the layer whose attention module is at ``path``, with so many channels per
        head.

        Raises:
            PlanError: if the options do not fit these heads.
        """

    def start(
        self, layer: str, key_dim: int, value_dim: int, heads: int | None = None
    ) -> LayerPlan:
        """The plan of a layer with ``heads`` KV heads (None: any number) before anything is known
        of its channels: by default `layer_plan`.

        Raises:
            PlanError: if the options do not fit these heads.
        """
        return self.layer_plan(layer, key_dim, value_dim)

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """The plan of a cache tensor of ``dim`` channels that is neither keys nor values of a known
        attention: by default the plan of values, see `LayerPlan.unknown`.

        Raises:
            PlanError: if ``dim`` channels cannot be stored so.
        """
        return self.layer_plan(path, dim, dim).unknown(path, dim)

    @property
    def calibrated(self) -> bool:
        """Whether plans depend on texts, and are made by `kvpass.calibrate`."""
        return False

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """The plan of a calibrated recipe: its layers by their paths, and a default for cache
        tensors that no known attention reads. ``run`` shows all texts as often as wanted; ``seed``
        is for whatever is drawn."""
        raise NotImplementedError

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """The plan of layers of these shapes; of a calibrated recipe, one whose caches hold as many
        bytes as those of what `fit` makes. It needs no text, and is good for sizes only.

        Raises:
            PlanError: if the options do not fit these heads.
        """
        layers = {path: self.start(path, k, v, heads) for path, (heads, k, v) in shapes.items()}
        return Plan(layers=layers, recipe=self.name)

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


def fitted(recipe: Recipe, run: CalibrationRunner, shapes: Mapping[str, Shape], seed: int) -> Plan:
    """The plan of a recipe, calibrated or not, for the model that ``run`` runs: the layers of these
    shapes by their paths, and a default for cache tensors that no known attention reads.

    Raises:
        PlanError: if the options do not fit the model.
    """
    if recipe.calibrated:
        return recipe.fit(run, seed)
    _, *dims = next(iter(shapes.values()))
    return replace(recipe.sized(shapes), default=recipe.layer_plan("*", *dims))


class CalibratedRecipe(Recipe):
    """A recipe that has no plan without texts, whatever its fields."""

    calibrated: ClassVar[bool] = True

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> NoReturn:
        """A `PlanError`: there is no plan without calibration."""
        raise calibration_needed(self.name)


def calibration_needed(recipe: str, otherwise: str = "") -> PlanError:
    """The error for a recipe whose plans are made from texts."""
    return PlanError(
        f"Recipe '{recipe}' is calibrated: use the plan that kvpass.calibrate(model, '{recipe}', "
        f"texts), or kvpass calibrate, makes{otherwise}."
    )


def _head_dim(config: Any) -> int:
    dim = getattr(config, "head_dim", None)
    return int(dim or config.hidden_size // config.num_attention_heads)
