"""Documents that are read once, and questions about them that are answered at once.

    python -m examples.prefilled_documents         # about a minute on 2 cores

The first half fills a folder, which may be done by another process, or yesterday. The second half
asks: the prompt is a document and a question, and `kvpass.PrefixStore` brings the document's cache.
On the small model that is shipped, whose documents have lines to recall.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from examples import one_sentence
from examples.quickstart import SMALL_MODEL, load, recall_prompt


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Questions about documents that were read before.")
    parser.add_argument("--folder", help="of the store; by default one that is removed at the end")
    parser.add_argument("--recipe", default="kivi-4bit")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each document")
    parser.add_argument("--questions", type=int, default=4, help="about each document")
    return parser.parse_args(argv)


def ask(model: Any, document: torch.Tensor, question: torch.Tensor, tokens: int) -> Any:
    """The answer's ids, and the seconds until there was a first one."""
    ids = torch.cat([document, question]).unsqueeze(0)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    start = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    seconds = time.perf_counter() - start
    return model.generate(ids, max_new_tokens=tokens, **options)[0, ids.shape[1] :], seconds


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Fills the store, asks with and without it, and prints both."""
    args = arguments(argv)
    model, tokenizer = load(str(SMALL_MODEL), "float32")
    model.compile(backend="kvpass", options={"recipe": args.recipe, "inner": args.inner})
    documents = [
        recall_prompt(tokenizer, args.tokens, args.questions, seed)
        for seed in range(args.documents)
    ]
    with TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        store = kvpass.PrefixStore(folder)
        start = time.perf_counter()
        for document in documents:
            store.prefill(model, document.document)
        seconds, held = time.perf_counter() - start, store.statistics
        print(f"{held.files} documents read in {seconds:.1f} s, with compiling; "
              f"{held.nbytes:,} bytes in {folder}")  # fmt: skip
        for name in ("computed", "from the store"):
            store = kvpass.PrefixStore(folder)
            times, right = [], []
            with nullcontext() if name == "computed" else store.use(model):
                for document in documents:
                    for question, answer in document.queries:
                        found, seconds = ask(model, document.document, question, len(answer))
                        times.append(seconds)
                        right.append(torch.equal(found, answer))
            first = sorted(times)[len(times) // 2]
            print(f"{name:<15}first token after {1e3 * first:6.1f} ms (median of {len(times)}), "
                  f"{sum(right)} of {len(right)} answers right")  # fmt: skip
        print(store.statistics)


if __name__ == "__main__":
    main()
