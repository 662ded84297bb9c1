"""`score`: what several ways to store its keys, or its values, may cost each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

from kvpass.calibration.calibrate import origin_of, require_packed
from kvpass.calibration.data import token_batches
from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import layer_shapes
from kvpass.calibration.scores import By, Scores, score_run
from kvpass.errors import OptionError, check, check_whole, unknown
from kvpass.plan import Plan
from kvpass.recipes import Auto, Recipe
from kvpass.recipes.base import fitted


def score(
    model: Any,
    candidates: Auto | Sequence[Plan | Recipe],
    data: Iterable[Any],
    *,
    by: By = "sensitivity",
    tokenizer: Any = None,
    samples: int = 64,
    length: int = 1024,
    batch: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> Scores:
    """Scores candidates for the keys and the values of every layer, once for all budgets.

    Args:
        model: a causal language model of transformers, not compiled. It is not changed.
        candidates: plans for this model, and recipes, which are calibrated first; or
            ``kvpass.recipe("auto")``: all of its that fit the model, see `Auto.candidates`.
        data, tokenizer, samples, length, batch, seed, progress: as `kvpass.calibrate`, which raises
            the same errors.
        by: ``importance``: the gradient's norm with respect to the weights that make keys or values
            (KVmix, section 3.1) times the rounding error's relative size. ``sensitivity``: the
            rounding errors, weighted by squared gradients (KVQuant, appendix P). ``loss``: what the
            loss grows by when this tensor alone is rounded; one forward pass for each candidate
            and tensor.
    """
    if by not in get_args(By):
        raise OptionError(unknown("score", by, get_args(By)))
    given = [candidates] if isinstance(candidates, Auto) else candidates
    fits = isinstance(given, Sequence) and len(given) > 0
    fits = fits and all(isinstance(x, Plan | Recipe) for x in given)
    allowed = "kvpass.recipe('auto'), or at least one kvpass.Plan or kvpass.Recipe"
    check("candidates", candidates, fits, allowed)
    check_whole("seed", seed, 0)
    batches = token_batches(data, tokenizer, samples, length, batch)
    for x in given:
        if isinstance(x, Recipe):
            require_packed(x, batches)
    run = ModelRunner(model, batches, progress)
    shapes = layer_shapes(run)
    origin = origin_of(model, shapes, batches, seed)
    if isinstance(candidates, Auto):
        plans = [replace(plan, calibration=origin) for plan in candidates.fitted(run, shapes, seed)]
    else:
        plans = [
            replace(fitted(x, run, shapes, seed), calibration=origin)
            if isinstance(x, Recipe)
            else x
            for x in given
        ]
    return score_run(run, shapes, plans, by)
