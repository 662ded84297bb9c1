"""Cocktail: a long document's cache, in bits by relevance to the question that is asked.

    python -m examples.cocktail                    # one question, seconds on 2 cores
    python -m examples.cocktail --encoder bm25     # or minilm, or the folder of an encoder
    python -m examples.cocktail --table            # accuracy and bits, about 5 minutes

Shows how relevant each chunk of a document is, the bits it gets, and what that does to the cache
and to the answer of the small model shipped beside this file. ``--table`` asks many questions, over
chunk sizes, thresholds and bits (the paper's table III and figure 7).
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from examples import one_sentence
from examples.quickstart import SMALL_MODEL, load, recall_prompt
from examples.small_model_data import RecallDocument, encode, recall_document
from kvpass.cocktail import Bm25, ChunkBits, TokenEmbeddings, TransformersEncoder, chunk_bits
from kvpass.cocktail.encoders import Encoder, Ranker
from kvpass.cocktail.search import thresholds
from kvpass.evaluate import cache_bytes, recall_accuracy
from kvpass.report import check_outputs

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 64
# About each document.
QUESTIONS = 24
# The paper's (section IV-B).
PAPER: dict[str, Any] = {"chunk": 32, "alpha": 0.6, "beta": 0.1, "bits": (2, 4, 16)}
SWEEPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("chunk", (8, 16, 32, 64, 128, 256)),
    ("alpha", (0.2, 0.4, 0.8)),
    ("beta", (0.0, 0.2, 0.4)),
    ("bits", ((3, 4, 16),)),
)
COMPARED = ("kivi-4bit", "kivi-2bit")
# The recipe's ``clip``. Chosen on documents 0 to 11, of which the table asks nothing.
CLIP = 0.8
FIRST = 100


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bits by relevance to the question.")
    parser.add_argument("--model", default=str(SMALL_MODEL), help="a local model folder")
    parser.add_argument(
        "--encoder", default="embeddings", help="embeddings, bm25, minilm, or a folder"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="of the document")
    parser.add_argument(
        "--question", type=int, default=0, choices=range(QUESTIONS), metavar="N", help="of 24"
    )
    parser.add_argument("--chunk", type=int, default=PAPER["chunk"], help="tokens in a chunk")
    parser.add_argument("--alpha", type=float, default=PAPER["alpha"])
    parser.add_argument("--beta", type=float, default=PAPER["beta"])
    parser.add_argument("--plot", metavar="FILE", help="draw the relevance (needs kvpass[plot])")
    parser.add_argument("--table", action="store_true", help="accuracy over many questions")
    parser.add_argument("--documents", type=int, default=4, help="of 24 questions, for --table")
    return parser.parse_args(argv)


def encoder_named(name: str, model: Any, tokenizer: Any) -> Encoder | Ranker:
    """What scores the chunks."""
    if name == "embeddings":
        return TokenEmbeddings(model, tokenizer)
    if name == "minilm":
        return TransformersEncoder.minilm()
    return Bm25() if name == "bm25" else TransformersEncoder(name)


def document_of(tokenizer: Any, tokens: int, seed: int) -> tuple[RecallDocument, Tensor]:
    """A document with 24 questions, and its token ids ``[T]``."""
    document = recall_document(random.Random(seed), tokenizer, tokens, n_queries=QUESTIONS)
    return document, torch.tensor(tokenizer(document.text)["input_ids"])


def strip(bits: ChunkBits) -> str:
    """The relevance of each chunk as a block, from the least to the most relevant, and its bits."""
    assert bits.scores is not None
    (scores,), (widths,) = bits.scores, bits.bits
    least, most = min(scores), max(scores)
    steps = [(len(BLOCKS) - 1) * (s - least) / ((most - least) or 1) for s in scores]
    blocks = "".join(BLOCKS[round(step)] for step in steps)
    signs = "".join("#" if width == 16 else f"{width:g}"[0] for width in widths)
    lines = []
    for at in range(0, len(blocks), WIDTH):
        lines += [f"relevance  {blocks[at : at + WIDTH]}", f"bits       {signs[at : at + WIDTH]}"]
    return "\n".join(lines)


def plot(bits: ChunkBits, alpha: float, beta: float, path: str) -> None:
    """Draws the relevance of each chunk, both thresholds, and the bits as colours."""
    import matplotlib.pyplot as plt

    assert bits.scores is not None
    (scores,), (widths,) = bits.scores, bits.bits
    figure, axes = plt.subplots(figsize=(7, 3))
    for width in sorted(set(widths)):
        held = [i for i, w in enumerate(widths) if w == width]
        axes.bar(held, [scores[i] for i in held], label=f"{width:g} bits")
    for threshold in thresholds(scores, alpha, beta):
        axes.axhline(threshold, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"chunk of {bits.chunk} tokens")
    axes.set_ylabel("relevance to the question")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


@torch.no_grad()
def show_question(args: argparse.Namespace) -> None:
    """One question: the search, and then each cache's size and answer."""
    model, tokenizer = load(args.model, "float32")
    document, ids = document_of(tokenizer, args.tokens, 0)
    question, answer = document.prompt(args.question), document.answers[args.question]
    ids = torch.cat([ids, torch.tensor(encode(tokenizer, question))]).unsqueeze(0)
    encoder = encoder_named(args.encoder, model, tokenizer)
    model(ids, use_cache=True)
    start = time.perf_counter()
    model(ids, use_cache=True)
    read = time.perf_counter()
    bits = chunk_bits(
        document.text,
        question,
        encoder=encoder,
        tokenizer=tokenizer,
        chunk=args.chunk,
        alpha=args.alpha,
        beta=args.beta,
        input_ids=ids,
    )
    found = time.perf_counter()
    print(f"{ids.shape[1]} tokens, question {question!r}, answer {answer!r}\n\n{strip(bits)}")
    print(f"(of {args.chunk} tokens each, from token {bits.starts[0]} on; #: exact)")
    print(f"search {(found - read) * 1e3:.0f} ms, plain prefill {(read - start) * 1e3:.0f} ms\n")
    if args.plot:
        plot(bits, args.alpha, args.beta, args.plot)
    recipes = [kvpass.recipe("cocktail", chunk=args.chunk, clip=clip) for clip in (1.0, CLIP)]
    print(f"{'cache':<20}{'bytes held':>12}{'bits/element':>14}{'answer':>9}")
    for name, recipe in (
        ("plain", None),
        *((name, name) for name in COMPARED),
        ("cocktail", recipes[0]),
        ("cocktail, clipped", recipes[1]),
    ):
        held, stored, text = answered(args, recipe, ids, bits, len(encode(tokenizer, answer)))
        # What is no answer may be the end of a line.
        shown = tokenizer.decode(text).replace("\n", " ")
        print(f"{name:<20}{held:>12,}{stored:>14.2f}{shown:>9}", flush=True)


def answered(
    args: argparse.Namespace,
    recipe: str | kvpass.Recipe | None,
    ids: Tensor,
    bits: ChunkBits,
    new: int,
) -> tuple[int, float, Tensor]:
    """Bytes and bits per element that a recipe's cache holds, and the answer's tokens."""
    # Dynamo counts the graphs of all models of one class together, and stops at eight.
    torch._dynamo.reset()
    model, _ = load(args.model, "float32")
    if recipe is not None:
        model.compile(backend="kvpass", options={"recipe": recipe, "inner": "eager"})
    with kvpass.cocktail.use(bits):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
        )
    return *cache_bytes(out.past_key_values), out.sequences[0, ids.shape[1] :]


@dataclass(frozen=True)
class Read:
    """A document that the model has read: a prefill is exact, whatever its cache will keep."""

    document: RecallDocument
    ids: Tensor
    cache: Any


class Table:
    """Recall through caches that are rounded as packed ones are."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.tokenizer = load(args.model, "float32")
        self.config = self.model.config
        self.encoder = encoder_named(args.encoder, self.model, self.tokenizer)
        self.seeds, self.tokens = range(FIRST, FIRST + args.documents), args.tokens
        self.read = [self._read(seed) for seed in self.seeds]

    @torch.no_grad()
    def _read(self, seed: int) -> Read:
        document, ids = document_of(self.tokenizer, self.tokens, seed)
        out = self.model(ids.unsqueeze(0), use_cache=True, logits_to_keep=1)
        return Read(document, ids, out.past_key_values)

    def uniform(self, name: str, recipe: kvpass.Recipe) -> str:
        """The row of a recipe that stores all documents alike."""
        plan = recipe.plan(self.config)
        right = recall_accuracy(
            self.model,
            [recall_prompt(self.tokenizer, self.tokens, QUESTIONS, seed) for seed in self.seeds],
            lambda: kvpass.oracle_cache(plan, self.config, self.model),
        )
        stored = [bits_stored(plan, len(read.ids), self.config.head_dim) for read in self.read]
        return row(name, sum(stored) / len(stored), right)

    def searched(
        self, name: str, options: dict[str, Any], clip: float = 1.0, all_low: bool = False
    ) -> str:
        """The row of a search with these options.

        Args:
            name: printed in front of the row.
            options: arguments of the search.
            clip: the recipe's.
            all_low: without the search, all chunks get the fewest bits.
        """
        fields = {name: options[name] for name in ("chunk", "bits")}
        plan = kvpass.recipe("cocktail", **fields, clip=clip).plan(self.config)
        right, stored = [], []
        for read, i in product(self.read, range(QUESTIONS)):
            bits = chunk_bits(
                read.ids[1:],
                read.document.prompt(i),
                encoder=self.encoder,
                tokenizer=self.tokenizer,
                starts=1,
                **options,
            )
            if all_low:
                bits = replace(bits, bits=((options["bits"][0],) * len(bits.bits[0]),))
            cache = kvpass.oracle_cache(plan, self.config, self.model)
            with kvpass.cocktail.use(bits):
                for number, layer in enumerate(read.cache.layers):
                    cache.update(layer.keys, layer.values, number)
            right.append(self._right(cache, read.document, i))
            stored.append(bits_stored(plan, len(read.ids), self.config.head_dim, bits))
        return row(name, sum(stored) / len(stored), sum(right) / len(right))

    @torch.no_grad()
    def _right(self, cache: Any, document: RecallDocument, i: int) -> bool:
        """Whether greedy decoding answers question ``i``: each token of the answer is the most
        likely one behind those before it. One step serves, since what it adds stays exact."""
        asked = encode(self.tokenizer, document.prompt(i))
        answer = encode(self.tokenizer, document.answers[i])
        step = torch.tensor([asked + answer[:-1]])
        out = self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=len(answer))
        return bool(out.logits[0].argmax(-1).tolist() == answer)


def bits_stored(
    plan: kvpass.Plan, tokens: int, head_dim: int, chunks: ChunkBits | None = None
) -> float:
    """Bits per element of the keys and values of so many tokens; exact ones count 16."""
    layer, stored = plan.layer_at(0), 0.0
    for tensor in (layer.keys, layer.values):
        if chunks is None:
            packed = {tensor.codec: tensor.retention.due(tokens)}
        else:
            codecs = {codec.bits: codec for codec in tensor.codecs if not codec.identity}
            widths = Counter(chunks.bits[0])
            packed = {codecs[w]: chunks.chunk * n for w, n in widths.items() if w in codecs}
        saved = sum(n * (16 - codec.bits_per_element(head_dim)) for codec, n in packed.items())
        stored += 16 - saved / tokens
    return stored / 2


def row(name: str, bits: float, right: float) -> str:
    """A line of the table."""
    return f"{name:<28}{bits:>8.2f}{right:>9.1%}"


def show_table(args: argparse.Namespace) -> None:
    """Accuracy and bits of many caches, over many questions."""
    table = Table(args)
    print(f"{len(table.read) * QUESTIONS} questions, encoder '{args.encoder}'")
    print(f"{'':<28}{'bits':>8}{'recall':>9}")
    for name in ("fp", *COMPARED):
        print(table.uniform(name, kvpass.recipe(name)), flush=True)
    for low in (2, 3, 4):
        options = PAPER | {"bits": (low, 8, 16)}
        print(table.searched(f"all chunks in {low} bits", options, all_low=True), flush=True)
    print(table.searched("the same, 2, clipped", PAPER, CLIP, all_low=True), flush=True)
    for field, values in SWEEPS:
        for value, clip in product(values, (1.0, CLIP)):
            shown = "/".join(map(str, value)) if field == "bits" else value
            name = f"{field} {shown}" + ", clipped" * (clip < 1)
            print(table.searched(name, PAPER | {field: value}, clip), flush=True)


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Shows one question, or the table."""
    args = arguments(argv)
    check_outputs(None, args.plot)
    (show_table if args.table else show_question)(args)


if __name__ == "__main__":
    main()
