"""``kvpass.calibrate``: a plan from a model, a recipe and texts."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from kvpass.calibration.data import token_batches
from kvpass.calibration.observe import ModelRunner
from kvpass.errors import OptionError, check, check_whole
from kvpass.fingerprint import fingerprint
from kvpass.plan import Calibration, Plan
from kvpass.ranks import check_whole_model
from kvpass.recipes import RECIPES, Recipe, overridden
from kvpass.recipes import recipe as recipe_named

_LIBRARIES = ("torch", "transformers", "scikit-learn")


def calibrate(
    model: Any,
    recipe: str | Recipe,
    data: Iterable[Any],
    *,
    tokenizer: Any = None,
    samples: int = 64,
    length: int = 1024,
    batch: int = 4,
    seed: int = 0,
    progress: bool = True,
    **overrides: Any,
) -> Plan:
    """Calibrates ``recipe`` for ``model``, on the device that it is on.

    The model runs over the texts, once for each kind of statistics, which are updated batch by
    batch; nothing of the size of the texts is kept. Equal arguments make equal plans.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        recipe: a calibrated recipe or its name, e.g. ``skvq-k2v2``.
        data: texts, token ids, or a data set of mappings with ``input_ids`` or ``text``.
        tokenizer: for texts.
        samples: pieces of text, at most.
        length: tokens of a piece, at most. Tokens in a recipe's exact window and sinks say nothing
            of what is packed: pieces should be much longer.
        batch: pieces that run at once.
        seed: for all that is drawn.
        progress: show a bar.
        overrides: fields of the recipe.

    Returns:
        The plan to pass as ``options={"recipe": plan}``, or to save.

    Raises:
        OptionError: if an argument is not allowed, the recipe is not calibrated, or several
            processes share the model.
        PlanError: if the recipe does not fit the model.
        UnmatchedGraphError: if no attention is found in the model.
    """
    base = recipe_named(recipe) if isinstance(recipe, str) else recipe
    allowed = f"a Recipe, or one of {', '.join(sorted(RECIPES))}"
    check("recipe", recipe, isinstance(base, Recipe), allowed)
    chosen = overridden(base, overrides)
    if not chosen.calibrated:
        raise OptionError(f"Recipe '{chosen.name}' as given needs no calibration; use it as it is.")
    check_whole("seed", seed, 0)
    batches = token_batches(data, tokenizer, samples, length, batch)
    require_packed(chosen, batches)
    check_whole_model(model, "Calibration")
    plan = chosen.fit(ModelRunner(model, batches, progress), seed)
    return replace(plan, calibration=origin_of(model, plan.layers, batches, seed))


def origin_of(
    model: Any, layers: Iterable[str], batches: Sequence[Tensor], seed: int
) -> Calibration:
    """The origin of plans for these layers of ``model``, made from the texts ``batches``."""
    versions = {"python": platform.python_version(), **dict(map(_version, _LIBRARIES))}
    tokens = sum(ids.numel() for ids in batches)
    return Calibration(seed, tokens, fingerprint(model, layers), versions)


def require_packed(recipe: Recipe, batches: Sequence[Tensor]) -> None:
    """Refuses texts that a recipe keeps exact: they say nothing of what it packs."""
    exact = sum(getattr(recipe, name, 0) for name in ("window", "sinks"))
    longest = max(ids.shape[1] for ids in batches)
    if longest <= exact:
        raise OptionError(
            f"The longest piece of text has {longest} tokens, and recipe '{recipe.name}' keeps "
            f"{exact} exact (window and sinks): nothing would be packed. Use longer texts, and "
            "length= above that."
        )


def _version(library: str) -> tuple[str, str]:
    try:
        return library, version(library)
    except PackageNotFoundError:
        return library, "none"
