"""What parts of KVmix are worth on the larger model: which tokens stay exact, how 3 bits are
packed, and which layers get more bits.

    python -m examples.kvmix_parts

Calibrates and measures as `examples.skvq_ablation` does.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import kvpass
from examples import one_sentence
from examples.judging import Judge, Judged, add_arguments
from examples.quickstart import held_out_ids
from kvpass.format.quantize import fake_quantize

# Of `kvmix-k2.19v2.38`.
SHARE = 0.2
# The layers of this plan change places by lot.
CHOSEN = "window 128"
PROMPT = 1024
DIMS = (64, 80, 96, 112, 128, 176, 256)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Exact tokens, 3-bit packing and layers of KVmix.")
    parser.add_argument("--lots", type=int, default=10, help="choices of layers by lot")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1])
    add_arguments(parser, "kvmix")
    return parser.parse_args(argv)


def retentions(ratios: Sequence[float]) -> list[tuple[str, dict[str, Any]]]:
    """Options of the recipe, by name: fixed windows, then each rule at each ratio."""
    windows: list[tuple[str, dict[str, Any]]] = [
        (f"window {tokens}", {"residual": tokens}) for tokens in (32, 128)
    ]
    return windows + [
        (f"{rule} {ratio:.0%}", {"exact": rule, "ratio": ratio, "more_ratio": ratio})
        for rule in ("pivotal", "fraction")
        for ratio in ratios
    ]


@torch.no_grad()
def channels(judge: Judge, kind: str) -> Tensor:
    """Keys or values ``[T, channels]`` of a held-out text, those of all layers side by side."""
    ids = held_out_ids(judge.tokenizer, PROMPT, 1)[0][None]
    cache = judge.model(input_ids=ids, use_cache=True).past_key_values
    found = [getattr(layer, kind)[0].transpose(0, 1).flatten(1) for layer in cache.layers]
    return torch.cat(found, dim=1)


def relative_error(x: Tensor, codec: kvpass.Codec, dim: int) -> float:
    """Norm of what the codec loses of ``x`` ``[T, channels]`` in heads of ``dim`` channels, over
    the norm of it."""
    heads = x.shape[1] // dim
    tokens = x[:, : heads * dim].view(1, -1, heads, dim).transpose(1, 2)
    return float((fake_quantize(codec, tokens) - tokens).norm() / tokens.norm())


def by_lot(plan: kvpass.Plan, count: int) -> Iterator[kvpass.Plan]:
    """Plans of as many bits, whose layers have changed places at random, of keys and of values."""
    chance, names = random.Random(0), list(plan.layers)
    for _ in range(count):
        keys, values = (chance.sample(names, len(names)) for _ in range(2))
        layers = {
            name: replace(plan.layers[name], keys=plan.layers[k].keys, values=plan.layers[v].values)
            for name, k, v in zip(names, keys, values, strict=True)
        }
        yield replace(plan, layers=layers)


def show_packing(judge: Judge) -> None:
    """Prints bytes of a token's codes and errors of both packings, for several head dimensions."""
    keys, values = channels(judge, "keys"), channels(judge, "values")
    print(f"\n{'':16}{'bytes':>14}{'error of keys':>20}{'error of values':>20}")
    print(f"{'head dimension':16}" + f"{'3-bit':>7}{'11':>7}" + f"{'3-bit':>10}{'11':>10}" * 2)
    for dim in DIMS:
        codecs = [
            (kvpass.Codec(3, "channel", 32, pack11=pack11),
             kvpass.Codec(3, "token", math.gcd(32, dim), pack11=pack11))
            for pack11 in (False, True)
        ]  # fmt: skip
        row = "".join(f"{2 * k.words.count(dim):>7}" for k, _ in codecs)
        row += "".join(f"{relative_error(keys, k, dim):>10.4f}" for k, _ in codecs)
        row += "".join(f"{relative_error(values, v, dim):>10.4f}" for _, v in codecs)
        print(f"{dim:<16}{row}", flush=True)


def rows(judge: Judge, args: argparse.Namespace) -> list[tuple[str, kvpass.Recipe | kvpass.Plan]]:
    """Which tokens stay exact, which layers get more bits, and both ways to pack 3 bits."""
    found: list[tuple[str, kvpass.Recipe | kvpass.Plan]] = [
        (name, kvpass.recipe("kvmix", share=SHARE, **fields))
        for name, fields in retentions(args.ratios)
    ]
    chosen = judge.plans(found)[CHOSEN]
    found += [(f"by lot {i}", plan) for i, plan in enumerate(by_lot(chosen, args.lots))]
    uniform: dict[str, Any] = {"share": 0.0, "key_bits": 3, "value_bits": 3, "residual": 32}
    for packing in ("3-bit", "11-per-int32"):
        found.append((packing, kvpass.recipe("kvmix", **uniform, packing=packing)))
    return found


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of what parts cost, and one of the packings."""
    args = arguments(argv)
    torch.manual_seed(0)
    judge = Judge(args)
    show_packing(judge)
    print(judge.judge(judge.plans(rows(judge, args)), Judged).table())


if __name__ == "__main__":
    main()
