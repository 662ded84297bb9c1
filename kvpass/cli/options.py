"""Options that several commands have. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

DTYPES = ("float16", "bfloat16", "float32")
# The compute capabilities that kernels can be compiled for.
TARGETS = {"sm_80": 80, "sm_90": 90}
POSITIVE = click.IntRange(min=1)


# Generic in newer versions of click only.
class ListOf(click.ParamType):  # type: ignore[type-arg]
    """Values of one type with commas between them: ``4096,32768``."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.name = f"{item.name} list"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help calls them."""
        choices = getattr(self.item, "choices", None)
        return f"{'|'.join(choices) if choices else 'N'},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """The values; those of a default are a sequence already."""
        parts = value.split(",") if isinstance(value, str) else value
        return [self.item.convert(part, param, ctx) for part in parts]


class Recipes(click.ParamType):  # type: ignore[type-arg]
    """Recipes with commas between them, also with fields: ``kivi-4bit,kivi-2bit,group=64``."""

    name = "recipes"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """What the help calls them."""
        return "NAME,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        """The recipes; a part with ``=`` is a field of the recipe before it."""
        if not isinstance(value, str):
            return list(value)
        found: list[str] = []
        for part in value.split(","):
            if "=" in part and found:
                found[-1] += f",{part}"
            else:
                found.append(part)
        return found


def choices(*names: str) -> ListOf:
    """The type of a list of these names."""
    return ListOf(click.Choice(names))


def together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator; the first is the first in the help."""
    return lambda function: reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


def recipes(default: str | None = "kivi-4bit,kivi-2bit") -> Decorator:
    """``--recipes``."""
    text = "Recipes, also with fields: kivi-2bit,group=128."
    return click.option("--recipes", type=Recipes(), default=default, help=text)


def named(names: list[str]) -> list[str]:
    """The recipes of ``--recipes``; ``all`` stands for every one."""
    from kvpass.recipes import RECIPES

    return list(RECIPES) if names == ["all"] else names


def outputs(plot: str = "Draw the result; needs kvpass[plot].") -> Decorator:
    """``--json`` and ``--plot``."""
    return together(json_file, click.option("--plot", metavar="FILE", help=plot))


json_file = click.option(
    "--json", metavar="FILE", help="Write all that was found, and the machine."
)
model_argument = click.argument("model", metavar="MODEL")
loading = together(
    click.option("--dtype", default="float32", type=click.Choice(DTYPES), help="Of the weights."),
    click.option("--device", default="cpu", help="Where the model runs."),
)


def given() -> dict[str, Any]:
    """All options of the command that runs, for a JSON file."""
    return dict(click.get_current_context().params)
