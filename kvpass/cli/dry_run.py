"""``kvpass bench gpu --dry-run``. Imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import click

from kvpass.cli.options import DTYPES, POSITIVE, TARGETS, ListOf, choices, given, recipes, together
from kvpass.cli.output import show

dry_options = together(
    click.option("--target", type=choices(*TARGETS), default="sm_90"),
    recipes(),
    click.option("--dtype", type=choices(*DTYPES), default="bfloat16"),
    click.option("--cache", type=choices("dynamic", "static"), default="dynamic,static"),
    click.option("--batch", type=ListOf(POSITIVE), default="1"),
)


def run_dry(
    json: str | None,
    target: Sequence[str],
    recipes: Sequence[str],
    dtype: Sequence[str],
    cache: Sequence[str],
    batch: Sequence[int],
) -> int:
    """Compiles a tiny model for every combination; 1 if any is not right."""
    import torch

    from kvpass.bench.dry_run import HEAD_DIM, Route, dry_run, dry_run_json, dry_run_section
    from kvpass.bench.plans import check_recipe
    from kvpass.errors import KvpassError, cut
    from kvpass.report import write_json

    for recipe in recipes:
        check_recipe(recipe, HEAD_DIM)
    routes = [
        Route(name, getattr(torch, precision), kind, size, TARGETS[gpu])
        for gpu, name, precision, kind, size in product(target, recipes, dtype, cache, batch)
    ]
    rows: list[dict[str, Any]] = []
    for route in routes:
        try:
            found = dry_run(route)
        except KvpassError:
            raise
        except Exception as error:
            problem = cut(f"{type(error).__name__}: {error}")
            print(f"{route}\n  FAILED {problem}\n", flush=True)
            rows.append({"route": str(route), "right": False, "problem": problem})
        else:
            show(dry_run_section(route, found))
            print(flush=True)
            rows += dry_run_json(route, found)
        write_json(json, "gpu --dry-run", given(), rows)
    wrong = sum(not row["right"] for row in rows)
    print(f"{len(routes)} routes, {len(rows)} graphs, {wrong} not right")
    return int(wrong > 0)
