"""What rotations of channels are worth on the larger model, part by part.

    python -m examples.rotation_ablation                             # 15 minutes on 2 cores
    python -m examples.rotation_ablation --folder more --outliers 8  # channels of keys stand out
    python -m examples.rotation_ablation --folder most --biases 600  # keys have large biases

Calibrates on files that the model was trained on, and measures as `kvpass eval` does how far
predictions on files that it has never seen diverge. A folder is for one model: those with outliers
or biases need their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

import kvpass
from examples import one_sentence
from examples.judging import Judge, Judged, add_arguments

# At 2 bits, in groups of 64 channels. Every step keeps what those before it have added, but that
# levels take the place of clipping, and it theirs.
PLAIN: dict[str, Any] = {"clip": False, "window": 0, "sinks": 0}
STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"key_rotation": False, "value_rotation": False}),
    ("Hadamard", {"key_rotation": "hadamard", "value_rotation": "hadamard"}),
    ("eigenbasis", {"key_rotation": "eigen", "value_rotation": "eigen"}),
    ("+ levels", {"levels": True}),
    ("+ clip", {"levels": False, "clip": True}),
    ("+ window", {"window": 128}),
    ("+ sinks", {"sinks": 5}),
)
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("kivi-2bit", {}),
    ("skvq-k2v2", {"group": 64}),
    ("skvq-k2v2", {"group": 32}),
    ("rotated-2bit", {"group": 32}),
    ("kivi-4bit", {}),
    ("rotated-4bit", {}),
    ("rotated-4bit", {"key_rotation": "hadamard"}),
    ("rotated-k4v2", {}),
    *((name, {"before_rope": True}) for name in ("kivi-2bit", "kivi-4bit", "rotated-4bit")),
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What rotations of channels are worth.")
    add_arguments(parser, "rotations")
    parser.add_argument("--outliers", type=float, default=1, help="see add_outliers")
    parser.add_argument("--biases", type=float, default=0, help="see add_biases")
    names = [name for name, _ in recipes()]
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=names, default=names)
    return parser.parse_args(argv)


def recipes() -> list[tuple[str, kvpass.Recipe]]:
    """The steps, and what they are compared with."""
    found, fields = [], PLAIN
    for name, change in STEPS:
        fields = fields | change
        found.append((name, kvpass.recipe("rotated-2bit", **fields)))
    for name, changed in OTHERS:
        words = ",".join([name, *(f"{field}={value}" for field, value in changed.items())])
        found.append((words, kvpass.recipe(name, **changed)))
    return found


@torch.no_grad()
def add_outliers(model: Any, factor: float) -> None:
    """Makes three pairs of channels of each head of keys ``factor`` times as large, and those of
    the queries as much smaller: the model's predictions stay as they are."""
    generator = torch.Generator().manual_seed(0)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for layer in model.model.layers:
        pairs = torch.rand(heads, 1, dim // 2, generator=generator).argsort(dim=2) < 3
        # The halves of a head are rotated together.
        scales = 1 + (factor - 1) * torch.cat([pairs, pairs], dim=2)
        keys, queries = layer.self_attn.k_proj, layer.self_attn.q_proj
        for part in (keys.weight, keys.bias):
            part.mul_(scales.expand(heads, 1, dim).reshape(-1, *[1] * (part.dim() - 1)))
        for part in (queries.weight, queries.bias):
            count = len(part) // heads // dim
            part.div_(scales.expand(heads, count, dim).reshape(-1, *[1] * (part.dim() - 1)))


@torch.no_grad()
def add_biases(model: Any, norm: float) -> None:
    """Adds biases of this norm to some 15% of the channels of each layer's keys."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        more = torch.randn(bias.shape, generator=generator)
        more *= torch.rand(bias.shape, generator=generator) < 0.15
        bias.add_(more * (norm / more.norm()))


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    args = arguments(argv)
    torch.manual_seed(0)
    judge = Judge(args)
    add_outliers(judge.model, args.outliers)
    add_biases(judge.model, args.biases)
    plans = judge.plans([(name, recipe) for name, recipe in recipes() if name in args.only])
    print(judge.judge(plans, Judged).table())


if __name__ == "__main__":
    main()
