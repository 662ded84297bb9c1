"""``kvpass zoo``: the command line of the zoo. Imports torch only when it runs."""

from __future__ import annotations

import argparse
from typing import Any

from kvpass.cli.options import given, positive


def add_zoo(commands: Any) -> None:
    """Adds ``zoo`` to the sub-parsers of a command line."""
    zoo = commands.add_parser(
        "zoo",
        help="check every model family",
        description="Makes a tiny random model of every decoder family of the installed "
        "transformers, runs it with a prompt and decode steps through kvpass, and compares its "
        "logits with the plain model (recipe fp) or with the oracle. Exits with 1 if any of them "
        "is wrong.",
    )
    add = zoo.add_argument
    add("--families", nargs="+", metavar="NAME", help="model types; default: all")
    add("--attention", nargs="+", default=["sdpa"], choices=("sdpa", "eager"))
    add("--cache", nargs="+", default=["dynamic"], choices=("dynamic", "static"))
    add("--padded", action="store_true", help="also a batch of three with padding on the left")
    add("--recipes", nargs="+", default=["fp", "kivi-4bit"], metavar="NAME")
    add("--inner", default="eager", choices=("eager", "inductor"), help="default: eager")
    add("--jobs", type=positive, default=1, metavar="N", help="processes (default: 1)")
    add("--limit", type=positive, default=300, help="seconds for one family")
    add("--json", metavar="FILE", help="write everything that was found")
    add("--markdown", metavar="FILE", help="write the table")
    zoo.set_defaults(run=run_zoo)


def run_zoo(args: argparse.Namespace) -> int:
    """``kvpass zoo``."""
    from kvpass.bench.report import check_outputs, write_json, write_text
    from kvpass.zoo.families import check_families, family_names
    from kvpass.zoo.pool import run_families
    from kvpass.zoo.table import markdown, outcome_json, zoo_section

    for path in (args.json, args.markdown):
        check_outputs(path)
    settings = _settings(args)
    families = list(dict.fromkeys(args.families or family_names()))
    check_families(families)
    outcomes = run_families(families, settings, args.jobs)
    print(zoo_section(outcomes))
    write_json(args.json, "zoo", given(args), [outcome_json(o) for o in outcomes])
    write_text(args.markdown, markdown(outcomes))
    return int(any(outcome.failed for outcome in outcomes))


def _settings(args: argparse.Namespace) -> Any:
    from kvpass.errors import OptionError
    from kvpass.zoo.outcome import Mode
    from kvpass.zoo.pool import Settings
    from kvpass.zoo.run import small_recipe

    for name in args.recipes:
        if small_recipe(name).calibrated:
            raise OptionError(
                f"Recipe '{name}' is calibrated; allowed: recipes that are not, as kivi-4bit."
            )
    modes = tuple(
        Mode(attention, cache, padded)
        for attention in dict.fromkeys(args.attention)
        for cache in dict.fromkeys(args.cache)
        for padded in ([False, True] if args.padded else [False])
    )
    return Settings(modes, tuple(dict.fromkeys(args.recipes)), args.inner, args.limit)
