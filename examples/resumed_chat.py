"""A chat that goes on after a restart, without reading again what was said.

    python -m examples.resumed_chat                # about half a minute on 2 cores

Each half loads the model anew, as another process would: the first reads a long text and answers;
the second knows what was said from a JSON file, and its cache from `kvpass.PrefixStore`. On the
small model that is shipped, which has no chat template: it goes on with all texts in a row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from examples import one_sentence
from examples.quickstart import SMALL_MODEL, load, recall_prompt
from kvpass.conversation import Conversation


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A chat that goes on after a restart.")
    parser.add_argument("--folder", help="of the chat; by default one that is removed at the end")
    parser.add_argument("--recipe", default="kivi-4bit")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--tokens", type=int, default=1024, help="of the text that is read first")
    return parser.parse_args(argv)


def turn(folder: Path, text: str, args: argparse.Namespace) -> str:
    """What a process does: loads the chat, replies to ``text``, and saves the chat."""
    model, tokenizer = load(str(SMALL_MODEL), "float32")
    store, saved = kvpass.PrefixStore(folder, min_new=1), folder / "chat.json"
    talk = Conversation(
        model, tokenizer, kvpass.recipe(args.recipe), tokens=4, inner=args.inner, prefixes=store
    )
    talk.messages = json.loads(saved.read_text()) if saved.exists() else []
    answer = talk.reply(text)
    saved.write_text(json.dumps(talk.messages, indent=1))
    read = talk.usage.tokens - store.statistics.tokens
    print(f"{talk.usage.tokens:,} tokens, {read:,} of them read now")
    return answer


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Two turns with a restart in between."""
    args = arguments(argv)
    _, tokenizer = load(str(SMALL_MODEL), "float32")
    asked = recall_prompt(tokenizer, args.tokens, 1, 0)
    (question, answer), *_ = asked.queries
    with TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        turn(folder, tokenizer.decode(asked.document), args)
        print("restarted")
        found = turn(folder, tokenizer.decode(question), args)
    print(f"asked {tokenizer.decode(question)!r}, it answers {found!r}; "
          f"right is {tokenizer.decode(answer)!r}")  # fmt: skip


if __name__ == "__main__":
    main()
