"""What parts of KVmix are worth on the small model: which tokens stay exact, how 3 bits are packed,
and which layers get more bits.

    python -m examples.kvmix_parts                 # about 6 minutes on 2 cores

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
from tqdm.auto import tqdm

import kvpass
from examples.quickstart import held_out_pieces
from examples.skvq_ablation import HEADER, PROMPT, SCORED, Bench, add_arguments
from kvpass.evaluate import quality
from kvpass.format.quantize import fake_quantize

# Of `kvmix-k2.19v2.38`.
SHARE = 0.2
BATCH = 32
DIMS = (64, 80, 96, 112, 128, 176, 256)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Exact tokens, 3-bit packing and layers of KVmix.")
    parser.add_argument("--lots", type=int, default=10, help="choices of layers by lot")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2])
    add_arguments(parser)
    # Importance ranks the four layers alike on any 16 of the texts.
    parser.set_defaults(samples=16)
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


def exact_tokens(plan: kvpass.TensorPlan, prompt: int, steps: int) -> tuple[int, int]:
    """How many tokens are exact after a prompt, and after as many steps of one token."""
    packed = plan.packed(prompt)
    first = prompt - packed
    for total in range(prompt, prompt + steps):
        packed += plan.retention.due(total - packed, packed)
    return first, prompt + steps - packed


def held(plan: kvpass.Plan, layers: int) -> tuple[float, float]:
    """Means of `exact_tokens` over the keys and values of all layers, as perplexity is measured."""
    tensors = [t for i in range(layers) for t in (plan.layer_at(i).keys, plan.layer_at(i).values)]
    counts = [exact_tokens(t, PROMPT, SCORED) for t in tensors]
    return sum(a for a, _ in counts) / len(counts), sum(b for _, b in counts) / len(counts)


@torch.no_grad()
def channels(bench: Bench, kind: str) -> Tensor:
    """Keys or values ``[T, channels]`` of a held-out text, those of all layers side by side."""
    cache = bench.model(input_ids=bench.texts[0][None, :PROMPT], use_cache=True).past_key_values
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


def show_lots(bench: Bench, count: int) -> None:
    """Prints what as many bits cost in the most important layers, and in layers chosen by lot."""
    plan = bench.plan(kvpass.recipe("kvmix", share=0.3, residual=128))
    texts = held_out_pieces(bench.tokenizer, PROMPT + SCORED)

    def divergence(plan: kvpass.Plan) -> float:
        def new_cache() -> Any:
            return kvpass.oracle_cache(plan, bench.model.config, bench.model)

        return 1000 * quality(bench.model, texts, PROMPT, new_cache, batch=BATCH).divergence

    own = divergence(plan)
    lots = [divergence(lot) for lot in tqdm(by_lot(plan, count), "lots", count, leave=False)]
    better = sum(own < lot for lot in lots)
    print(
        f"\nlayers by importance: divergence {own:.2f} (0.001 nats per token); by lot "
        f"{sum(lots) / count:.2f} on average, {better} of {count} are worse"
    )


def show_packing(bench: Bench) -> None:
    """Prints bytes of a token's codes and errors of both packings, for several head dimensions."""
    keys, values = channels(bench, "keys"), channels(bench, "values")
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


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of the rules and two of the packings."""
    args = arguments(argv)
    torch.manual_seed(0)
    bench = Bench(args)
    bench.show_plain()
    print(f"{HEADER}{'exact at first':>16}{'at last':>9}", flush=True)
    for name, fields in tqdm(retentions(args.ratios), desc="exact tokens", leave=False):
        plan = bench.plan(kvpass.recipe("kvmix", share=SHARE, **fields))
        first, last = held(plan, bench.model.config.num_hidden_layers)
        tqdm.write(f"{bench.row(name, plan)}{first:>16.1f}{last:>9.1f}")
    show_packing(bench)
    show_lots(bench, args.lots)
    print(f"\n3 bits everywhere\n{HEADER}", flush=True)
    for packing in ("3-bit", "11-per-int32"):
        recipe = kvpass.recipe(
            "kvmix", share=0.0, key_bits=3, value_bits=3, residual=32, packing=packing
        )
        tqdm.write(str(bench.row(packing, bench.plan(recipe))))


if __name__ == "__main__":
    main()
