"""What each part of KVQuant is worth on the larger model: the order of the paper's table 1.

    python -m examples.kvquant_ladder

Calibrates and measures as `examples.skvq_ablation` does.
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
    (
        "per channel",
        {"uniform": True, "before_rope": False, "qnorm": False, "window": 0, "sinks": 1},
    ),
    ("before RoPE", {"before_rope": True}),
    ("nuq", {"uniform": False}),
    ("+ 1% outliers", {"outliers": 0.01}),
    ("+ Q-Norm", {"qnorm": True}),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What each part of KVQuant is worth.")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    add_arguments(parser, "kvquant")
    return parser.parse_args(argv)


def per_token(bits: int, channels: int) -> kvpass.Plan:
    """Keys and values in one group per token, of all heads; the first token stays exact."""
    codec = kvpass.Codec(bits, "token", channels)
    tensor = kvpass.TensorPlan(codec, kvpass.RetentionPolicy(sinks=1))
    return kvpass.Plan(kvpass.LayerPlan(tensor, tensor))


def recipes(bits: int) -> list[tuple[str, kvpass.Recipe]]:
    """The steps at so many bits."""
    fields: dict[str, Any] = {}
    found: list[tuple[str, kvpass.Recipe]] = []
    for name, change in STEPS:
        fields |= change
        found.append((name, kvpass.recipe(f"kvquant-nuq{bits}", **fields)))
    # With a window and more sinks, which the paper has not.
    names = (f"kvquant-nuq{bits}", f"kvquant-nuq{bits}-1%")
    return [*found, *((name, kvpass.recipe(name)) for name in names)]


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of all numbers of bits."""
    args = arguments(argv)
    torch.manual_seed(0)
    judge = Judge(args)
    channels = judge.model.config.num_key_value_heads * judge.model.config.head_dim
    rows: list[tuple[str, kvpass.Recipe | kvpass.Plan]] = []
    for bits in args.bits:
        rows.append((f"per token, {bits} bits", per_token(bits, channels)))
        rows += [(f"{name}, {bits} bits", recipe) for name, recipe in recipes(bits)]
    print(judge.judge(judge.plans(rows), Judged).table())


if __name__ == "__main__":
    main()
