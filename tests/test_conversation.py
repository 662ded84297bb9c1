"""A conversation: the cache goes on from turn to turn, and changes no word."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpass import PrefixStore, recipe
from kvpass.cli import main
from kvpass.cli import run as command
from kvpass.conversation import Conversation

MODEL = str(Path(__file__).parents[1] / "examples" / "small_model")
TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
# As templates that drop what a model thought: only users are kept of earlier turns.
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}\n{% endif %}{% endfor %}"
)
TEXTS = ("import os\n\ndef main(", "\nclass Cache:\n    def ", "\n    return ")


@pytest.fixture(scope="module")
def plain():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def talking(name="fp", template=None, **options):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    return Conversation(model, tokenizer, recipe(name), tokens=6, inner="eager", **options)


def completed(plain, tokenizer, ids):
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_replies_are_those_to_the_whole_text(template, plain):
    talk = talking(template=template)
    for text in TEXTS:
        ids = talk._ids([*talk.messages, {"role": "user", "content": text}])
        pieces: list[str] = []
        answer = talk.reply(text, pieces.append)
        assert answer == completed(plain, talk.tokenizer, ids)
        assert "".join(pieces) == answer
        assert talk.usage.tokens == ids.shape[1] + 5
        assert talk.usage.plain == talk.usage.tokens * 4 * 2 * 2 * 64 * 2


def test_a_turn_reads_what_is_new():
    talk = talking(template=TURNS)
    talk.reply(TEXTS[0])
    before = talk._cache
    ids = talk._ids([*talk.messages, {"role": "user", "content": TEXTS[1]}])
    pairs = zip(talk._read.tolist(), ids[0].tolist(), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert same > 8
    assert talk._cache_for(ids[0]) is before
    assert before.get_seq_length() == same
    # Another beginning: nothing of it can be read again.
    ids[0, 0] += 1
    assert talk._cache_for(ids[0]) is not before


def test_an_interrupted_turn_is_forgotten(plain):
    def interrupt(piece):
        raise KeyboardInterrupt

    talk = talking()
    talk.reply(TEXTS[0])
    said = list(talk.messages)
    with pytest.raises(KeyboardInterrupt):
        talk.reply(TEXTS[1], interrupt)
    assert talk.messages == said
    assert talk.usage.held == 0
    ids = talk._ids([*said, {"role": "user", "content": TEXTS[2]}])
    assert talk.reply(TEXTS[2]) == completed(plain, talk.tokenizer, ids)


def test_the_command_replies(plain, capsys, tmp_path):
    arguments = ["--prompt", TEXTS[0], "--recipe", "fp", "--tokens", "6", "--inner", "eager"]
    assert main(["run", MODEL, *arguments, "--prefix-store", str(tmp_path / "store")]) == 0
    said = capsys.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert said.out.rstrip("\n") == completed(plain, tokenizer, ids).rstrip("\n")
    tokens = ids.shape[1] + 5
    assert f"{tokens} tokens in " in said.err
    assert "0 of 1 prompts had a stored prefix" in said.err
    assert f"in 16 bits {tokens * 4 * 2 * 2 * 64 * 2:,}" in said.err


def test_a_chat_goes_on_after_a_restart(tmp_path, plain):
    for answers in range(2):
        talk = talking(template=TURNS, prefixes=PrefixStore(tmp_path, min_new=8))
        talk.messages = [{"role": "user", "content": 40 * "x = 1\n"}]
        ids = talk._ids([*talk.messages, {"role": "user", "content": TEXTS[0]}])
        assert talk.reply(TEXTS[0]) == completed(plain, talk.tokenizer, ids)
        assert talk.prefixes.statistics.hits == answers
    assert talk.prefixes.statistics.tokens == ids.shape[1] - 1


def test_a_chat(tmp_path, monkeypatch, capsys):
    """Lines with a slash; mistakes do not end it."""
    saved, page = tmp_path / "said.json", tmp_path / "page.html"
    lines = iter([
        "/explain", TEXTS[0], f"/explain {page}", "/recipe kivi-3bit", "/recipe skvq-k2v2",
        "/recipe kivi-2bit", TEXTS[1], "/explain", f"/save {saved}", "/save no/x.json", "/what",
        "/quit",
    ])  # fmt: skip
    monkeypatch.setattr(Console, "input", lambda self, prompt: next(lines))
    command._chat(talking(), Console(width=200))
    said = capsys.readouterr().out
    assert next(lines, None) is None
    assert "Unknown recipe 'kivi-3bit'. Did you mean" in said
    assert "Recipe 'skvq-k2v2' is calibrated" in said
    assert "recipe kivi-2bit, run by eager" in said
    assert "'no/x.json' cannot be written" in said
    assert said.count("/recipe NAME") == 2
    said = [m["content"] for m in json.loads(saved.read_text())][::2]
    assert said == list(TEXTS[:2])
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "kvpass: 'nowhere' is not a model folder: it has no config.json."),
        ([MODEL, "--recipe", "auto"], "kvpass: Recipe 'auto' is calibrated"),
        ([MODEL, "--recipe", "x.safetensors"], "kvpass: "),
        ([MODEL, "--prefix-store", __file__], "kvpass: The folder '"),
        ([MODEL, "--temperature", "-1"], "kvpass run: Invalid value for '--temperature'"),
    ],
)
def test_mistakes(arguments, sentence, capsys):
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1
