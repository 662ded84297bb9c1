"""The identity of a model and of how its cache is stored: what a saved cache belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import compile_options, is_subclass
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.dtypes import dtype_name
from kvpass.options import parse_options, planner_digest
from kvpass.plan import Plan
from kvpass.recipes.base import Recipe
from kvpass.recipes.cocktail import Cocktail

# Values of each weight that count.
_SAMPLES = 1024
# What a config says that changes no answer, or is compared by itself.
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class Identity:
    """What a saved cache belongs to.

    Attributes:
        dtype: of the model.
        recipe, plan: the name of what the model is compiled with, and the SHA-256 of all that it
            says; None: the model is not compiled by kvpass, or not yet.
        model: see `model_digest`.
    """

    dtype: str
    recipe: str | None
    plan: str | None
    model: str

    @staticmethod
    def of(model: Any) -> Identity:
        """The identity of ``model`` as it is now.

        Raises:
            OptionError: if the options that it is compiled with are not allowed.
            PlanError: if the file of its plan cannot be read.
        """
        return Identity(dtype_name(model.dtype), *_plan_digest(model), model_digest(model))

    def difference(self, saved: Mapping[str, Any]) -> str | None:
        """Why what was ``saved`` is of no use here, behind "is for", or None."""
        if saved["dtype"] != self.dtype:
            return f"a model in {saved['dtype']}, this one is in {self.dtype}"
        if self.plan is not None and saved["plan"] != self.plan:
            same = " with other options" if saved["recipe"] == self.recipe else ""
            made = f"recipe '{saved['recipe']}'" if saved["recipe"] else "a model without kvpass"
            return f"{made}{same}, this model is compiled with '{self.recipe}'"
        if saved["model"] != self.model:
            return "another model: its config or its weights differ"
        return None


def needs_chunk_bits(model: Any) -> bool:
    """Whether ``model`` is compiled with a recipe or a plan of which each request chooses bits."""
    planner = _planner(model)
    if isinstance(planner, Plan):
        layers = [planner.default, *planner.layers.values()]
        return any(isinstance(layer.keys, ChunkedPlan) for layer in layers)
    return isinstance(planner, Cocktail)


def _planner(model: Any) -> Recipe | Plan | None:
    """What ``model`` is compiled with; None if it is not compiled by kvpass."""
    # Perhaps a part of it is: the model that an adapter is around.
    found = map(compile_options, model.modules())
    options = next((options for options in found if options is not None), None)
    return None if options is None else parse_options(options).planner


def _plan_digest(model: Any) -> tuple[str | None, str | None]:
    """`Identity.recipe` and `Identity.plan`."""
    planner = _planner(model)
    return (None, None) if planner is None else planner_digest(planner)


def model_digest(model: Any) -> str:
    """The SHA-256 of a model's config and of samples of every weight, in hexadecimal digits.

    Of each weight the name, the shape, the dtype and up to 1024 values at even distances count.
    Models that differ in none of these are taken for one.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IGNORED}
    found = hashlib.sha256(_json(config))
    for name, weight in sorted(model.state_dict().items()):
        if isinstance(weight, Tensor):
            _add(found, name, weight)
    return found.hexdigest()


def _add(found: Any, name: str, weight: Tensor) -> None:
    if is_subclass(weight):
        names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner in names:
            _add(found, f"{name}.{inner}", getattr(weight, inner))
        return
    found.update(_json([name, list(weight.shape), dtype_name(weight.dtype)]))
    count = min(weight.numel(), _SAMPLES)
    at = torch.arange(count, device=weight.device) * (weight.numel() - 1) // max(count - 1, 1)
    sampled = weight.detach().reshape(-1)[at].cpu()
    found.update(sampled.view(torch.uint8).numpy().tobytes())


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
