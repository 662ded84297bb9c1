"""`serve_packed`: one line that lets a model serve many requests from a packed pool."""

from __future__ import annotations

from typing import Any

import transformers

from kvpass.errors import OptionError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.options import parse_options
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import DEFAULT, Recipe
from kvpass.serving.pages import FULL, SLIDING, layers_by_type, window_of, within

# The versions of transformers whose continuous batching `kvpass.serving` is written for.
KNOWN = ("5.20", "5.21", "5.22", "5.23", "5.24")


def serve_packed(model: Any, recipe: str | Recipe | Plan = DEFAULT, **fields: Any) -> Any:
    """Lets ``generate_batch`` and ``continuous_batching_context_manager`` keep keys and values of
    ``model`` in packed pages.

    Tokens of a prompt attend to packed tokens as generated ones do, so that the answer to a request
    does not depend on what else is served. ``num_blocks`` are packed ones; a number that is not
    given follows from the memory.

    Args:
        model: a decoder of transformers, on one device.
        recipe: the name of a recipe, a recipe, a plan, or the path of a plan's file.
        fields: of the recipe, to be replaced.

    Returns:
        ``model``.

    Raises:
        OptionError: if the model, the recipe or this version of transformers is not supported.
        PlanError: if the recipe does not fit the model, or has to be calibrated.
    """
    check_version()
    planner = parse_options({"recipe": recipe, **fields}).planner
    config = model.config.get_text_config()
    _check_model(model, config)
    plan = planner.plan(model.config) if isinstance(planner, Recipe) else planner
    layers = config.num_hidden_layers
    for kind, numbers in layers_by_type(config).items():
        for i in numbers:
            _check_plan(plan.layer_at(i), i, config, window_of(config, kind))

    from kvpass.serving.manager import install

    install(model, plan, layers)
    return model


def is_known_version() -> bool:
    """Whether the continuous batching of this version of transformers is known."""
    version: str = transformers.__version__
    return version.startswith(tuple(f"{known}." for known in KNOWN))


def check_version() -> None:
    """Refuses a version of transformers that is not known.

    Raises:
        OptionError: if this is one.
    """
    if not is_known_version():
        raise OptionError(
            f"transformers {transformers.__version__} is not supported in serving; allowed: "
            f"{', '.join(KNOWN)}."
        )


def _check_model(model: Any, config: Any) -> None:
    """Refuses a model whose caches are not pages of full or of sliding attention.

    Raises:
        OptionError: if this is one.
    """
    name = type(model).__name__
    if not hasattr(model, "init_continuous_batching"):
        raise OptionError(f"{name} has no continuous batching; allowed: decoders of transformers.")
    if getattr(model, "_device_mesh", None) is not None:
        raise OptionError(f"{name} is on several devices; allowed in packed pages: one.")
    if others := sorted(set(layers_by_type(config)) - {FULL, SLIDING}):
        raise OptionError(
            f"{name} has layers of {', '.join(others)}; allowed in packed pages: {FULL} and "
            f"{SLIDING}."
        )


def _check_plan(plan: LayerPlan, number: int, config: Any, window: int) -> None:
    """Refuses a layer's plan that packed pages cannot hold, where queries see ``window`` positions
    (0: all).

    Raises:
        OptionError: if this is one.
        PlanError: if it does not fit the model.
    """
    from transformers.generation.continuous_batching import utils

    dim = utils.find_head_dim(config)
    plan.check(str(number), dim, dim, utils.find_num_key_value_heads(config))
    reason = "keys before their rotary embedding" if plan.before_rope else None
    for tensor in (plan.keys, plan.values):
        reason = reason or _unsupported(within(tensor, window))
    if reason is not None:
        raise OptionError(
            f"The plan of layer {number} has {reason}; allowed in packed pages: fp, and recipes "
            "like kivi-4bit, skvq-k2v2, rotated-2bit and auto with before_rope=False."
        )


def _unsupported(plan: TensorPlan) -> str | None:
    """What packed pages do not have of a plan, or None."""
    if isinstance(plan, ChunkedPlan):
        return "bits of chunks"
    if plan.codec.static_ranges:
        return "calibrated ranges"
    if plan.retained:
        return "tokens that a filter retains"
    if plan.grows:
        return "a fraction of all tokens that stays exact"
    if plan.sinks and plan.codec.token_group > 1:
        return "sinks before groups of tokens"
    return None
