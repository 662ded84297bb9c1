"""Recipes by name. A new one is a file here and a line in `RECIPES`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvpass.errors import OptionError, check, unknown
from kvpass.recipes.auto import Auto as Auto
from kvpass.recipes.base import Recipe as Recipe
from kvpass.recipes.cocktail import Cocktail as Cocktail
from kvpass.recipes.fp import Fp as Fp
from kvpass.recipes.kivi import Kivi as Kivi
from kvpass.recipes.kvmix import Kvmix as Kvmix
from kvpass.recipes.kvquant import Kvquant as Kvquant
from kvpass.recipes.rotated import Rotated as Rotated
from kvpass.recipes.skvq import Skvq as Skvq
from kvpass.written import written

DEFAULT = "kivi-4bit"
RECIPES: dict[str, Callable[[], Recipe]] = {
    "auto": Auto,
    "cocktail": Cocktail,
    "fp": Fp,
    "kivi-4bit": lambda: Kivi(bits=4),
    "kivi-2bit": lambda: Kivi(bits=2),
    "kvmix": Kvmix,
    "kvmix-k2.19v2.38": lambda: Kvmix(share=0.2),
    "kvmix-k2.28v2.56": lambda: Kvmix(share=0.3),
    **{f"kvquant-nuq{n}": partial(Kvquant, bits=n) for n in (4, 3, 2)},
    **{f"kvquant-nuq{n}-1%": partial(Kvquant, bits=n, outliers=0.01) for n in (4, 3, 2)},
    "rotated-4bit": Rotated,
    "rotated-k4v2": lambda: Rotated(value_bits=2, clip=0.8),
    "rotated-2bit": lambda: Rotated(2, 2, "token", None, "eigen", "eigen", clip=True),
    "skvq-k2v2": Skvq,
    "skvq-k2v1.5": lambda: Skvq(value_bits=1.5),
}


def recipe(name: str = DEFAULT, **overrides: Any) -> Recipe:
    """The recipe with that key in `RECIPES`, and some fields replaced, e.g. ``bits`` for KIVI.

    Raises:
        OptionError: if the name, a field or a value is not allowed.
    """
    if name not in RECIPES:
        raise OptionError(unknown("recipe", name, RECIPES))
    return overridden(RECIPES[name](), overrides)


def written_recipe(text: str) -> Recipe:
    """`recipe` of a command line: ``kivi-2bit``, or with fields ``kivi-2bit,group=128``."""
    name, overrides = written_fields(text)
    return recipe(name, **overrides)


def written_fields(text: str) -> tuple[str, dict[str, Any]]:
    """The name in a recipe of a command line, and the fields behind it."""
    return written(text, "Recipe", "kivi-2bit,group=64")


def overridden(base: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """``base`` with some fields replaced; raises as `recipe`."""
    allowed = [f.name for f in fields(base)]
    for key in overrides.keys() & base.renamed.keys():
        warnings.warn(
            f"kvpass: option {key!r} of recipe '{base.name}' is called {base.renamed[key]!r} now; "
            "the old name is understood by this release only.",
            FutureWarning,
            stacklevel=3,
        )
    overrides = {base.renamed.get(key, key): value for key, value in overrides.items()}
    for key, value in overrides.items():
        if key not in allowed:
            raise OptionError(unknown(f"option of recipe '{base.name}':", key, allowed))
        kinds = "numbers, texts, True, False, None, and tuples of them"
        check(key, value, _plain(value), kinds)
    return replace(base, **overrides)


def _plain(value: Any) -> bool:
    """False for an array, say, which may look like a number but cannot be compared as one."""
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | None)
