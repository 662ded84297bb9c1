"""Weights in 8 bits by torchao, the KV cache in 3 bits by kvpass: what is held, and what it costs.

    python -m examples.quantized_weights           # about 2 minutes on 2 cores; needs torchao

On the small model that is shipped, calibrated on files that it was trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

import kvpass
from examples import one_sentence
from examples.quickstart import SMALL_MODEL, held_out_ids, load
from examples.small_model_data import read_texts, training_files
from kvpass.evaluate import cache_bytes, perplexity


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="8-bit weights beside a 3-bit KV cache.")
    parser.add_argument("--recipe", default="kvquant-nuq3-1%")
    parser.add_argument("--samples", type=int, default=16, help="calibration texts")
    parser.add_argument("--texts", type=int, default=4, help="held-out texts")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each")
    parser.add_argument("--scored", type=int, default=64, help="tokens of each")
    return parser.parse_args(argv)


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters, as they are held."""
    held = 0
    for parameter in model.parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            names, _ = parameter.__tensor_flatten__()
            held += sum(getattr(parameter, name).nbytes for name in names)
        else:
            held += parameter.nbytes
    return held


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for the plain model, and one for each thing that is quantized."""
    if find_spec("torchao") is None:
        raise SystemExit("This example needs torchao, which is not installed: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    args = arguments(argv)
    model, tokenizer = load(str(SMALL_MODEL), "float32")
    texts = held_out_ids(tokenizer, args.prompt + args.scored, args.texts)

    def show(name: str, runs: Any) -> None:
        loss = perplexity(runs, texts, args.prompt)
        with torch.no_grad():
            out = runs(texts[0][: args.prompt].unsqueeze(0), use_cache=True, logits_to_keep=1)
        cache, bits = cache_bytes(out.past_key_values)
        print(f"{name:34}weights {weight_bytes(model):>12,} B   cache {cache:>10,} B, "
              f"{bits:5.2f} bits   perplexity {loss:.3f}", flush=True)  # fmt: skip

    show("plain", model)
    quantize_(model, Int8WeightOnlyConfig())
    show("weights in 8 bits", model)
    plan = kvpass.calibrate(
        model,
        args.recipe,
        read_texts(training_files()[:: max(1, len(training_files()) // args.samples)]),
        tokenizer=tokenizer,
        samples=args.samples,
    )
    model.compile(backend="kvpass", options={"recipe": plan})
    show(f"and the cache by {args.recipe}", model)


if __name__ == "__main__":
    main()
