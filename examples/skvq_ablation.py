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
from examples import one_sentence
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
    parser.add_argument(
        "--clusters",
        action="store_true",
        help="also groups of unequal size, which plain PyTorch reads: an hour more",
    )
    add_arguments(parser, "skvq")
    return parser.parse_args(argv)


def recipes(group: int, dim: int, clusters: bool) -> list[tuple[str, kvpass.Recipe]]:
    """The steps with groups of so many channels, and what they are compared with, for heads of
    ``dim`` channels."""
    fields: dict[str, Any] = {"group": group}
    found: list[tuple[str, kvpass.Recipe]] = []
    for name, change in STEPS:
        fields |= change
        # A group of all channels of a head has no order.
        if group < dim or not change.get("reorder"):
            found.append((name, kvpass.recipe("skvq-k2v2", **fields)))
    if group < dim:
        found.append(("without reorder", kvpass.recipe("skvq-k2v2", **fields | {"reorder": False})))
    if group < dim and clusters:
        unequal = fields | {"reorder": "clusters"}
        found.append(("unequal groups", kvpass.recipe("skvq-k2v2", **unequal)))
    found.append(("before RoPE", kvpass.recipe("skvq-k2v2", **fields, before_rope=True)))
    return [*found, ("kivi-2bit", kvpass.recipe("kivi-2bit", group=group))]


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of all sizes of groups."""
    args = arguments(argv)
    torch.manual_seed(0)
    judge = Judge(args)
    more = judge.model.config.head_dim, args.clusters
    rows = [
        (f"{name}, group {g}", recipe) for g in args.groups for name, recipe in recipes(g, *more)
    ]
    print(judge.judge(judge.plans(rows), Judged).table())


if __name__ == "__main__":
    main()
