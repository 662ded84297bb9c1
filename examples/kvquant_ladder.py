"""What each part of KVQuant is worth on the small model: the order of the paper's table 1.

    python -m examples.kvquant_ladder              # about 15 minutes on 2 cores

Calibrates and measures as `examples.skvq_ablation` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

import kvpass
from examples.skvq_ablation import HEADER, Bench, add_arguments

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
    add_arguments(parser)
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


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each number of bits."""
    args = arguments(argv)
    torch.manual_seed(0)
    bench = Bench(args)
    bench.show_plain()
    config = bench.model.config
    for bits in args.bits:
        print(f"\n{bits} bits\n{HEADER}", flush=True)
        start = per_token(bits, config.num_key_value_heads * config.head_dim)
        tqdm.write(str(bench.row("per token", start)))
        for name, recipe in tqdm(recipes(bits), desc=f"{bits} bits", leave=False):
            tqdm.write(str(bench.row(name, bench.plan(recipe))))


if __name__ == "__main__":
    main()
