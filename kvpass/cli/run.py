"""``kvpass run``: a model in the terminal. Imports torch only when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvpass.cli.models import load_model
from kvpass.cli.options import POSITIVE, loading, model_argument

if TYPE_CHECKING:
    from kvpass.conversation import Conversation

_HELP = """\
/recipe NAME    another format of the cache, e.g. kivi-2bit,group=64, or a plan's file
/explain [FILE] what was done to the model; FILE.html: as a page
/save FILE      the conversation as JSON
/quit           or Ctrl-D; Ctrl-C stops a reply"""


@click.command(
    short_help="chat with a model, or let it complete a text",
    epilog="Example: kvpass run Qwen/Qwen3-0.6B --recipe kivi-2bit",
)
@model_argument
@click.option("--recipe", default="kivi-4bit", help="Also kivi-2bit,group=64, or a plan's file.")
@click.option("--prompt", help="Reply to this and end; by default, what stdin has, or a chat.")
@click.option("--tokens", type=POSITIVE, default=256, help="The most of a reply.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: no sampling.")
@click.option("--inner", type=click.Choice(["inductor", "eager"]), default="inductor")
@click.option("--prefix-store", metavar="FOLDER", help="Stores what is read, and goes on from it.")
@loading
def run(
    model: str,
    recipe: str,
    prompt: str | None,
    tokens: int,
    temperature: float,
    inner: str,
    prefix_store: str | None,
    dtype: str,
    device: str,
) -> None:
    """Chats with MODEL, a folder or a name on the Hugging Face hub, or lets it complete texts if it
    has no chat template. Beneath a reply stand the bytes of its cache and what 16 bits would take.
    """
    from kvpass.conversation import Conversation
    from kvpass.options import ready_planner
    from kvpass.store.prefixes import PrefixStore

    planner = ready_planner(recipe)
    prefixes = None if prefix_store is None else PrefixStore(prefix_store)
    loaded, tokenizer = load_model(model, dtype, device)
    talk = Conversation(
        loaded, tokenizer, planner,
        tokens=tokens, temperature=temperature, inner=inner, prefixes=prefixes,
    )  # fmt: skip
    if prompt is None and sys.stdin.isatty():
        _chat(talk, Console())
    else:
        _reply(talk, sys.stdin.read() if prompt is None else prompt, Console(soft_wrap=True))


def _chat(talk: Conversation, console: Console) -> None:
    # Arrow keys and a history for `input`.
    import readline  # noqa: F401

    from kvpass.errors import KvpassError

    console.print(Text(_HELP, style="dim"))
    while True:
        try:
            text = console.input("[bold]> [/]")
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        try:
            if text.startswith("/"):
                console.print(Text(_command(talk, *text[1:].split(maxsplit=1))))
            elif text:
                _reply(talk, text, console)
        except KvpassError as error:
            console.print(Text(f"kvpass: {error}", style="red"))
        except KeyboardInterrupt:
            console.print(Text("stopped; this turn is forgotten", style="dim"))


def _command(talk: Conversation, name: str = "", argument: str = "") -> str:
    """Does what a line with a slash says; what to print."""
    from kvpass import explain
    from kvpass.options import ready_planner
    from kvpass.report import write_text

    if name == "recipe" and argument:
        talk.use(ready_planner(argument))
        return f"{argument} from now on"
    if name == "save" and argument:
        write_text(argument, json.dumps(talk.messages, indent=1, ensure_ascii=False) + "\n")
        return f"saved as {argument}"
    if name == "explain" and argument:
        write_text(argument, explain(talk.model).html())
        return f"saved as {argument}"
    return str(explain(talk.model)) if name == "explain" else _HELP


def _reply(talk: Conversation, text: str, console: Console) -> None:
    with _written(talk, console) as writer:
        talk.reply(text, writer.write)
    # Not into the text where that goes to a file.
    beneath = Console(stderr=True, soft_wrap=True, highlight=False)
    beneath.print(Text(str(talk.usage), style="dim"))
    if talk.prefixes is not None:
        beneath.print(Text(str(talk.prefixes.statistics), style="dim"))


class _Writer:
    """Prints whole lines, and keeps the last, unfinished one above the state of the cache."""

    def __init__(self, talk: Conversation, console: Console, live: Live) -> None:
        self.talk, self.console, self.live, self.rest = talk, console, live, ""

    def write(self, piece: str) -> None:
        *lines, self.rest = (self.rest + piece).split("\n")
        for line in lines:
            self.console.print(Text(line))
        self.live.update(Group(Text(self.rest), Text(str(self.talk.usage), style="dim")))


@contextmanager
def _written(talk: Conversation, console: Console) -> Iterator[_Writer]:
    """A `_Writer`; what it has left is printed at the end."""
    waiting = Text("reading the prompt; what is new is compiled first", style="dim")
    live = Live(waiting, console=console, transient=True, auto_refresh=console.is_terminal)
    with live:
        writer = _Writer(talk, console, live)
        try:
            yield writer
        finally:
            live.update(Text())
    console.print(Text(writer.rest))
