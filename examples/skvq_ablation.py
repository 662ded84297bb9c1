"""What each part of SKVQ is worth on the larger model: the ablation of the paper's table 3.

    python -m examples.skvq_ablation

Calibrates on files that the model was trained on, and measures as `kvpass eval` does how far
predictions on files that it has never seen diverge.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import kvpass
from examples.judging import Judge, Judged, add_arguments

# Every step keeps what those before it have added.
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("RTN", {"window": 0, "sinks": 0, "fp8": False, "clip": False, "reorder": False}),
    ("+ window", {"window": 128}),
    ("+ clip", {"clip": True}),
    ("+ reorder", {"reorder": "balanced"}),
    ("+ sinks", {"sinks": 5}),
    ("+ fp8", {"fp8": True}),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What each part of SKVQ is worth.")
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 128])
    add_arguments(parser, "skvq")
    return parser.parse_args(argv)


def recipes(group: int) -> list[tuple[str, kvpass.Recipe]]:
    """The steps with groups of so many channels, and what they are compared with."""
    fields: dict[str, Any] = {"group": group}
    found: list[tuple[str, kvpass.Recipe]] = []
    for name, change in STEPS:
        fields |= change
        found.append((name, kvpass.recipe("skvq-k2v2", **fields)))
    unequal = kvpass.recipe("skvq-k2v2", **fields | {"reorder": "clusters"})
    before = kvpass.recipe("skvq-k2v2", **fields, before_rope=True)
    kivi = kvpass.recipe("kivi-2bit", group=group)
    return [*found, ("before RoPE", before), ("unequal groups", unequal), ("kivi-2bit", kivi)]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of all sizes of groups."""
    args = arguments(argv)
    torch.manual_seed(0)
    judge = Judge(args)
    rows = [(f"{name}, group {g}", recipe) for g in args.groups for name, recipe in recipes(g)]
    print(judge.judge(judge.plans(rows), Judged).table())


if __name__ == "__main__":
    main()
