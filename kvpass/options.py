"""``torch.compile(options=...)`` for kvpass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from kvpass.errors import OptionError, check, check_flag, shown, unknown
from kvpass.format.shard import Shard
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import DEFAULT, RECIPES, Recipe, overridden, recipe, written_recipe
from kvpass.recipes.base import calibration_needed
from kvpass.shards import shard_of

INNER = ("inductor", "eager")
# Options that are no field of a recipe.
_OWN = ("inner", "mode", "shard", "strict")
# What `Plan.with_` replaces.
_OF_PLANS = ("window", "sinks", "qnorm")


@dataclass(frozen=True)
class Options:
    """The options of a user.

    Attributes:
        planner: a recipe or a plan; also the name of a recipe, or of a plan's file.
        strict: raise where a graph cannot be rewritten, instead of running it unchanged.
        inner: what compiles the rewritten graph.
        mode: of Inductor; here because torch.compile takes no mode beside options.
        shard: the part of every sequence that this process holds; None: all of it.
    """

    planner: Recipe | Plan
    strict: bool = False
    inner: Literal["inductor", "eager"] = "inductor"
    mode: str | None = None
    shard: Shard | None = None


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Reads ``options``: ``recipe``, ``strict``, ``inner``, ``mode``, ``shard`` (a process group or
    a mesh of one dimension), and fields of the recipe, or those of `Plan.with_` with a plan.

    Raises:
        OptionError: if a name or value is not allowed.
        PlanError: if the plan's file cannot be read.
    """
    rest = dict(options or {})
    chosen, strict = rest.pop("recipe", DEFAULT), rest.pop("strict", False)
    inner, mode = rest.pop("inner", "inductor"), rest.pop("mode", None)
    shard = shard_of(rest.pop("shard", None))
    check("mode", mode, isinstance(mode, str | None), "a mode of Inductor")
    check_flag("strict", strict)
    if not isinstance(inner, str) or inner not in INNER:
        raise OptionError(unknown("inner compiler", inner, INNER))
    return Options(_planner(chosen, rest), strict, cast(Any, inner), mode, shard)


def written_planner(text: str) -> Recipe | Plan:
    """What a command line gives as a recipe: ``kivi-2bit,group=64``, or the path of a plan.

    Raises:
        OptionError: if a name, a field or a value is not allowed.
        PlanError: if the plan's file cannot be read.
    """
    return Plan.load(text) if text.endswith(".safetensors") else written_recipe(text)


def ready_planner(text: str) -> Recipe | Plan:
    """`written_planner` of what compiles as it is.

    Raises:
        PlanError: also if the recipe is calibrated.
    """
    found = written_planner(text)
    if isinstance(found, Recipe) and found.calibrated:
        raise calibration_needed(found.name)
    return found


def planner_digest(planner: Recipe | Plan) -> tuple[str, str]:
    """The name of ``planner``, and the SHA-256 of all that it says, in hexadecimal digits."""
    said: Any = repr(planner)
    if isinstance(planner, Plan):
        said = [_said(planner.default), {n: _said(x) for n, x in planner.layers.items()}]
    name = planner.recipe if isinstance(planner, Plan) else planner.name
    return name, hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _said(plan: LayerPlan) -> list[Any]:
    """All that a layer's plan says."""
    numbers = (plan.key_basis, plan.value_basis, plan.key_ranges)
    read = [None if x is None else [x.heads, x.dtype, x.data.hex()] for x in numbers]
    return [str(plan.keys), str(plan.values), plan.before_rope, read]


def compile_config(**options: Any) -> Any:
    """A ``CompileConfig`` of transformers for ``generate(..., cache_implementation="static")``,
    with ``options`` as in ``model.compile(backend="kvpass", options=...)``.

    transformers compiles what ``generate`` calls on accelerators only; with this it does so on
    CPUs, too. ``model.compile(backend="kvpass")`` needs none of it.

    Raises:
        OptionError: if one is not allowed.
        PlanError: if the plan's file cannot be read.
    """
    from transformers import CompileConfig

    parse_options(options)
    # A mode beside options is refused by torch.compile; ours is among the options.
    config = CompileConfig(backend="kvpass", mode=None, options=options)
    config._compile_all_devices = True
    return config


def _planner(chosen: Any, overrides: Mapping[str, Any]) -> Recipe | Plan:
    if isinstance(chosen, str) and chosen.endswith(".safetensors"):
        chosen = Plan.load(chosen)
    if isinstance(chosen, str):
        base = recipe(chosen)
    elif isinstance(chosen, Recipe):
        base = chosen
    elif isinstance(chosen, Plan):
        if others := sorted(overrides.keys() - set(_OF_PLANS)):
            raise OptionError(
                f"A Plan is made for what it says of {', '.join(others)}: make another one, or "
                f"calibrate again; allowed with a Plan: {', '.join((*_OF_PLANS, *_OWN))}."
            )
        return chosen.with_(**overrides) if overrides else chosen
    else:
        raise OptionError(
            f"recipe={shown(chosen)} is not supported; allowed: a Recipe, a Plan, the path of a "
            f"plan's *.safetensors file, or one of {', '.join(sorted(RECIPES))}."
        )
    known = {f.name for f in fields(base)}
    for name in overrides:
        if name not in known | base.renamed.keys():
            raise OptionError(unknown("option", name, {*known, "recipe", *_OWN}))
    return overridden(base, overrides)
