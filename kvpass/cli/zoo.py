"""``kvpass zoo``: the command line of the zoo. Imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvpass.cli.options import POSITIVE, ListOf, choices, given, json_file, recipes
from kvpass.cli.output import show


@click.command(
    short_help="check every model family", epilog="Example: kvpass zoo --families llama,gemma3_text"
)
@click.option("--families", type=ListOf(click.STRING), help="Model types; all if not given.")
@click.option("--attention", type=choices("sdpa", "eager"), default="sdpa")
@click.option("--cache", type=choices("dynamic", "static"), default="dynamic")
@click.option("--padded", is_flag=True, help="Also a batch of three with padding on the left.")
@recipes("fp,kivi-4bit")
@click.option("--inner", type=click.Choice(["eager", "inductor"]), default="eager")
@click.option("--jobs", type=POSITIVE, default=1, help="Processes.")
@click.option("--limit", type=POSITIVE, default=300, help="Seconds for one family.")
@json_file
@click.option("--markdown", metavar="FILE", help="Write the table.")
def zoo(
    families: list[str] | None,
    jobs: int,
    json: str | None,
    markdown: str | None,
    **options: Any,
) -> int:
    """Makes a tiny random model of every decoder family of the installed transformers, runs it with
    a prompt and decode steps through kvpass, and compares its logits with the plain model (recipe
    fp) or with the oracle. Exits with 1 if any of them is wrong.
    """
    from kvpass.report import check_outputs, write_json, write_text
    from kvpass.zoo import table
    from kvpass.zoo.families import check_families, family_names
    from kvpass.zoo.pool import run_families

    for path in (json, markdown):
        check_outputs(path)
    settings = _settings(**options)
    wanted = list(dict.fromkeys(families or family_names()))
    check_families(wanted)
    outcomes = run_families(wanted, settings, jobs)
    show(table.zoo_section(outcomes))
    write_json(json, "zoo", given(), [table.outcome_json(o) for o in outcomes])
    write_text(markdown, table.markdown(outcomes))
    return int(any(outcome.failed for outcome in outcomes))


def _settings(
    attention: Sequence[str],
    cache: Sequence[str],
    padded: bool,
    recipes: Sequence[str],
    inner: str,
    limit: int,
) -> Any:
    from kvpass.errors import OptionError
    from kvpass.zoo.outcome import Mode
    from kvpass.zoo.pool import Settings
    from kvpass.zoo.run import small_recipe

    for name in recipes:
        if small_recipe(name).calibrated:
            raise OptionError(
                f"Recipe '{name}' is calibrated; allowed: recipes that are not, as kivi-4bit."
            )
    modes = tuple(
        Mode(a, c, p)
        for a in dict.fromkeys(attention)
        for c in dict.fromkeys(cache)
        for p in ([False, True] if padded else [False])
    )
    return Settings(modes, tuple(dict.fromkeys(recipes)), inner, limit)
