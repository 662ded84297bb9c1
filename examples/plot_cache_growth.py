"""Draw what a cache holds while it grows, measured on real cache tensors.

    python -m examples.plot_cache_growth --out examples/cache_growth.svg      # needs kvpass[plot]

Generates 2,000 tokens with a one-layer random model under each recipe, and
plots the bytes held after every token, spare room included.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass.evaluate import cache_bytes

PROMPT = 64


def model() -> Any:
    """One layer with 2 KV heads of 128 channels, in bfloat16."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=128,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


@torch.no_grad()
def growth(recipe: str | None, tokens: int) -> list[int]:
    """Bytes held after each generated token; ``recipe`` None is the plain cache."""
    torch._dynamo.reset()
    net = model()
    if recipe is not None:
        net.compile(backend="kvpass", options={"recipe": recipe, "inner": "eager"})
    out = net(torch.arange(PROMPT)[None] % 128, use_cache=True)
    held = []
    for t in tqdm(range(tokens), desc=recipe or "plain", leave=False):
        token = torch.tensor([[t % 128]])
        out = net(token, past_key_values=out.past_key_values, use_cache=True)
        held.append(cache_bytes(out.past_key_values)[0])
    return held


def main() -> None:
    """Measures and draws."""
    parser = argparse.ArgumentParser(description="Plot what a cache holds while it grows.")
    parser.add_argument("--out", default="cache_growth.svg")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("Plotting needs matplotlib: pip install 'kvpass[plot]'.")
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for recipe in (None, "kivi-4bit", "kivi-2bit"):
        held = growth(recipe, args.tokens)
        axes.plot([b / 2**20 for b in held], label=recipe or "bfloat16 cache")
        print(f"{recipe or 'plain':<10} {held[-1]:>12,} bytes after {PROMPT + args.tokens} tokens")
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("MiB held per layer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
