"""Generate from a packed KV cache, and see what it costs and saves.

    python -m examples.quickstart                  # the larger model shipped beside this file
    python -m examples.quickstart --model PATH     # a folder, or a name on the Hugging Face hub

Loads a model, continues a long prompt with the plain cache, with kivi-4bit and with kivi-2bit, and
prints cache bytes, bits per element, held-out perplexity, recall accuracy and the first token that
differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from examples import one_sentence
from examples.small_model_data import held_out_files, read_texts, recall_document
from kvpass.cli.models import load_model
from kvpass.evaluate import RecallPrompt, cache_bytes, first_difference, perplexity, recall_accuracy

SMALL_MODEL = Path(__file__).resolve().parent / "small_model"
LARGER_MODEL = SMALL_MODEL.parent / "larger_model"
RECIPES = (None, "kivi-4bit", "kivi-2bit")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    tokens: torch.Tensor
    nbytes: int
    bits: float
    perplexity: float
    recall: float
    seconds: float


class Progress(BaseStreamer):
    """A bar of generated tokens."""

    def __init__(self, name: str, total: int) -> None:
        self._bar = tqdm(total=total, desc=f"{name}: generate", leave=False)
        self._prompt = True

    def put(self, value: Any) -> None:
        """Called with the prompt first, then with every token."""
        if not self._prompt:
            self._bar.update(value.numel())
        self._prompt = False

    def end(self) -> None:
        """Called after the last token."""
        self._bar.close()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else ""
    )
    parser.add_argument("--model", default=str(LARGER_MODEL), help="a folder, or a name on the hub")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--texts", type=int, default=4, help="held-out texts for the perplexity")
    parser.add_argument("--scored", type=int, default=128, help="tokens scored per text")
    parser.add_argument("--questions", type=int, default=24, help="recall questions")
    return parser.parse_args(argv)


@one_sentence()
def load(path: str, dtype: str) -> tuple[Any, Any]:
    """A model in ``dtype`` and its tokenizer.

    Raises:
        SystemExit: with one sentence, if there is none, or it cannot be loaded.
    """
    return load_model(path, dtype, "cpu")


def held_out_ids(tokenizer: Any, length: int, count: int) -> list[torch.Tensor]:
    """The first ``length`` tokens of ``count`` held-out files that are long enough."""
    ids = (
        torch.tensor(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        for text in read_texts(held_out_files())
    )
    texts = [t[:length] for t in ids if t.numel() >= length][:count]
    if not texts:
        sys.exit(f"No held-out file has {length} tokens; ask for fewer with --prompt-tokens.")
    return texts


def recall_prompt(tokenizer: Any, length: int, questions: int, seed: int = 0) -> RecallPrompt:
    """A document of ``length`` tokens to remember, and ``questions`` questions about it."""
    document = recall_document(random.Random(seed), tokenizer, length, n_queries=questions)

    def ids(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    asked = tuple(
        (ids(document.prompt(i)), ids(answer)) for i, answer in enumerate(document.answers)
    )
    read = torch.tensor(tokenizer(document.text, add_special_tokens=True)["input_ids"])
    return RecallPrompt(read, asked)


def measure(
    model: Any,
    judge: Any,
    name: str,
    args: argparse.Namespace,
    texts: list[torch.Tensor],
    recall: RecallPrompt,
) -> Row:
    """Everything the table says of one cache: ``model`` generates, ``judge`` is scored."""
    prompt = texts[0][: args.prompt_tokens].unsqueeze(0)
    start = time.perf_counter()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=Progress(name, args.new_tokens),
    )
    seconds = time.perf_counter() - start
    nbytes, bits = cache_bytes(out.past_key_values)
    return Row(
        name=name,
        tokens=out.sequences[0, prompt.shape[1] :],
        nbytes=nbytes,
        bits=bits,
        perplexity=perplexity(judge, texts, args.prompt_tokens, progress=True),
        recall=recall_accuracy(judge, [recall], progress=True),
        seconds=seconds,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'cache':<12}{'bytes held':>12}{'bits/element':>14}{'perplexity':>12}{'recall':>9}"
        f"{'first difference':>18}"
    ]
    for row in rows:
        at = first_difference(rows[0].tokens, row.tokens)
        where = "-" if row is rows[0] else "none" if at is None else f"token {at}"
        lines.append(
            f"{row.name:<12}{row.nbytes:>12,}{row.bits:>14.2f}{row.perplexity:>12.4f}"
            f"{row.recall:>9.1%}{where:>18}"
        )
    return "\n".join(lines)


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the demonstration."""
    args = arguments(argv)
    _, tokenizer = load(args.model, args.dtype)
    texts = held_out_ids(tokenizer, args.prompt_tokens + args.scored, args.texts)
    recall = recall_prompt(tokenizer, args.prompt_tokens, args.questions)
    rows = []
    for recipe in RECIPES:
        # Dynamo counts the graphs of all models of one class together, and stops at eight.
        torch._dynamo.reset()
        model, judge = (load(args.model, args.dtype)[0] for _ in range(2))
        if recipe is not None:
            model.compile(backend="kvpass", options={"recipe": recipe, "inner": args.inner})
            # Scored through the same packed ops, without waiting for Inductor a second time.
            judge.compile(backend="kvpass", options={"recipe": recipe, "inner": "eager"})
        rows.append(measure(model, judge, recipe or "plain", args, texts, recall))
    print(kvpass.explain(model))
    print(
        f"\n{args.model}: prompt of {args.prompt_tokens} tokens, {args.new_tokens} generated; "
        f"perplexity of {len(texts)} x {args.scored} held-out tokens; "
        f"{args.questions} recall questions\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
