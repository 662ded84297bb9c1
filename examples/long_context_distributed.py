"""A cache that several processes share, each with a part of every sequence.

    torchrun --nproc-per-node 2 -m examples.long_context_distributed

On GPUs, where this has not been run, give all of them one model. 10 million tokens of an 8B Llama
on 8 GPUs, and what each of them would hold, read and send:

    torchrun --nproc-per-node 8 -m examples.long_context_distributed --model PATH --device cuda \\
        --dtype bfloat16 --prompt-tokens 10000000 --part-tokens 8192
    kvpass estimate llama-3.1-8b --recipes kivi-2bit --context 10000000 --devices 8 --device h200

That predicts 31 GB of cache on each, 16 of weights, and for a step 12 ms, of which 0.35 are the
gathers of 16.5 KB in each of 32 layers. Every process generates the same tokens; the first one
prints what each of them holds. The prompt is read in parts, so that not more than the keys and
values of one layer are plain at a time: of 10 million tokens 41 GB on each.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from transformers import DynamicCache

from examples import one_sentence
from examples.quickstart import SMALL_MODEL, load
from kvpass.evaluate import cache_bytes


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SMALL_MODEL), help="a local model folder")
    parser.add_argument("--recipe", default="kivi-2bit", help="a recipe, or a plan's file")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--part-tokens", type=int, default=1024, help="of the prompt, at a time")
    parser.add_argument("--new-tokens", type=int, default=32)
    return parser.parse_args(argv)


@torch.no_grad()
def generate(model: Any, ids: torch.Tensor, part: int, new: int) -> tuple[list[int], DynamicCache]:
    """The ``new`` likeliest tokens behind the prompt ``ids`` ``[1, T]``, and their cache."""
    cache, found = DynamicCache(config=model.config), []
    for piece in ids.split(part, dim=1):
        logits = model(piece, past_key_values=cache, logits_to_keep=1).logits
    for _ in range(new):
        token = logits[:, -1:].argmax(-1)
        found.append(int(token))
        logits = model(token, past_key_values=cache, logits_to_keep=1).logits
    return found, cache


def report(args: argparse.Namespace, device: str) -> str:
    """Generates on all processes: what each of them holds, a line each."""
    model, _ = load(args.model, args.dtype)
    model.to(device)
    options = {"recipe": args.recipe, "inner": args.inner, "shard": distributed.group.WORLD}
    model.compile(backend="kvpass", options=options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.prompt_tokens), generator=generator)
    tokens, cache = generate(model, ids.to(device), args.part_tokens, args.new_tokens)
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, (tokens, cache_bytes(cache)[0]))
    shapes = [x.shape for layer in cache.layers for x in (layer.keys, layer.values)]
    plain = sum(shape.numel() for shape in shapes) * model.dtype.itemsize
    lines = [f"{cache.get_seq_length():,} tokens: {plain:,} bytes as they are"]
    for rank, (found, held) in enumerate(every):
        same = "the same tokens" if found == tokens else f"OTHER TOKENS {found}"
        lines.append(f"rank {rank}: {held:,} bytes, {same}")
    return "\n".join(lines)


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Generates, and prints a line for each process."""
    args = arguments(argv)
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun --nproc-per-node N -m examples.long_context_distributed.")
    device: str = args.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if args.device == "cpu" else "nccl")
    text = report(args, device)
    if distributed.get_rank() == 0:
        print(text)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
