"""``kvpass zoo``: the command line of the zoo. Imports torch only when it runs."""

from __future__ import annotations

import argparse
from typing import Any


def add_zoo(commands: Any) -> None:
    """Adds ``zoo`` to the sub-parsers of a command line."""
    description = (
        "Makes a tiny random model of every decoder family of the installed transformers, runs it "
        "with a prompt and decode steps through kvpass, and compares its logits with the plain "
        "model (recipe fp) or with the oracle. Exits with 1 if any of them is wrong."
    )
    zoo = commands.add_parser("zoo", help="check every model family", description=description)
    zoo.add_argument("--families", nargs="+", metavar="NAME", help="model types; default: all")
    zoo.add_argument("--attention", nargs="+", default=["sdpa"], metavar="NAME",
                     help="sdpa (default), eager")  # fmt: skip
    zoo.add_argument("--cache", nargs="+", default=["dynamic"], metavar="NAME",
                     help="dynamic (default), static")  # fmt: skip
    zoo.add_argument("--padded", action="store_true",
                     help="also a batch of three with padding on the left")  # fmt: skip
    zoo.add_argument("--recipes", nargs="+", default=["fp", "kivi-4bit"], metavar="NAME")
    zoo.add_argument("--inner", default="eager", help="eager (default) or inductor")
    zoo.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    zoo.add_argument("--limit", type=float, default=300, help="seconds for one family")
    zoo.add_argument("--json", metavar="FILE", help="write everything that was found")
    zoo.add_argument("--markdown", metavar="FILE", help="write the table")
    zoo.set_defaults(run=run_zoo)


def run_zoo(args: argparse.Namespace) -> int:
    """``kvpass zoo``."""
    from kvpass.bench.report import check_outputs, write_json
    from kvpass.zoo.families import check_families, family_names
    from kvpass.zoo.pool import run_families
    from kvpass.zoo.table import outcome_json, write_markdown, zoo_section

    for path in (args.json, args.markdown):
        check_outputs(path, None)
    settings = _settings(args)
    families = list(dict.fromkeys(args.families or family_names()))
    check_families(families)
    outcomes = run_families(families, settings, args.jobs, progress=True)
    print(zoo_section(outcomes))
    if args.json:
        named = {name: value for name, value in vars(args).items() if name != "run"}
        write_json(args.json, "zoo", named, [outcome_json(o) for o in outcomes])
    if args.markdown:
        write_markdown(args.markdown, outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def _settings(args: argparse.Namespace) -> Any:
    """What the options ask for, checked.

    Raises:
        OptionError: if a name or a number is not allowed.
    """
    from kvpass.errors import OptionError, unknown
    from kvpass.options import INNER
    from kvpass.zoo.outcome import ATTENTIONS, CACHES, Mode
    from kvpass.zoo.pool import Settings
    from kvpass.zoo.run import small_recipe

    kinds = {"attention": ATTENTIONS, "cache": CACHES}
    for option, allowed in kinds.items():
        for name in getattr(args, option):
            if name not in allowed:
                raise OptionError(unknown(option, name, allowed))
    if args.inner not in INNER:
        raise OptionError(unknown("inner compiler", args.inner, INNER))
    for name in args.recipes:
        if small_recipe(name).calibrated:
            raise OptionError(
                f"Recipe '{name}' is calibrated; allowed: recipes that are not, as kivi-4bit."
            )
    for option in ("jobs", "limit"):
        if getattr(args, option) < 1:
            raise OptionError(f"--{option} {getattr(args, option)} is not supported; at least 1.")
    modes = tuple(
        Mode(attention, cache, padded)
        for attention in dict.fromkeys(args.attention)
        for cache in dict.fromkeys(args.cache)
        for padded in ([False, True] if args.padded else [False])
    )
    return Settings(modes, tuple(dict.fromkeys(args.recipes)), args.inner, args.limit)
