"""Generated documents: for any tokenizer, the same for a seed, and with the answer in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from examples.quickstart import SMALL_MODEL
from kvpass.errors import OptionError
from kvpass.evaluate import TASKS, Settings
from kvpass.evaluate.documents import Sample, Writer, words_of
from tests.models import tiny_model

TEXTS = ["def f(x):\n    return x\n\n" * 200 + "x = 1  # " + "a long line " * 100]


def byte_tokenizer() -> Any:
    """One token for each byte, and none that begins a text."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def tokenizer(kind: str) -> Any:
    if kind == "bytes":
        return byte_tokenizer()
    return AutoTokenizer.from_pretrained(SMALL_MODEL, local_files_only=True)


def samples(kind: str, length: int, texts: list[str] = TEXTS, **settings: Any) -> list[Sample]:
    return Writer(tokenizer(kind), texts).samples(Settings(seeds=2, **settings), length)


def equal(a: Sample, b: Sample) -> bool:
    queries = zip(a.prompt.queries, b.prompt.queries, strict=True)
    return torch.equal(a.prompt.document, b.prompt.document) and all(
        torch.equal(x, y) for pair in queries for x, y in zip(*pair, strict=True)
    )


@pytest.mark.parametrize(("kind", "length"), [("bytes", 2048), ("small", 1024)])
@pytest.mark.parametrize("texts", [TEXTS, []])
def test_documents_are_exact_and_the_same_for_a_seed(
    kind: str, length: int, texts: list[str]
) -> None:
    found = samples(kind, length, texts)
    assert all(equal(a, b) for a, b in zip(found, samples(kind, length, texts), strict=True))
    (tokens,) = {len(s.prompt.document) for s in found}
    longest = max(len(q) + len(a) for s in found for q, a in s.prompt.queries)
    assert tokens + longest + 8 == length
    assert {(s.task, s.seed) for s in found} == {(t, seed) for t in TASKS for seed in (0, 1)}
    seeds = [[s for s in found if s.seed == seed] for seed in (0, 1)]
    assert not any(equal(a, b) for a, b in zip(*seeds, strict=True))


@pytest.mark.parametrize(("kind", "length"), [("bytes", 2048), ("small", 1024)])
def test_answers_are_in_the_document(kind: str, length: int) -> None:
    decode = tokenizer(kind).decode
    for sample in samples(kind, length):
        text = decode(sample.prompt.document)
        for question, answer in sample.prompt.queries:
            right = decode(answer).strip()
            for part in [right] if sample.expected else right.removeprefix("= ").split(", "):
                assert part in text, (sample.task, part)
            if sample.task in ("json", "tool", "recall"):
                # The whole line, as it is asked for.
                assert f"{decode(question)}{decode(answer)}\n" in text
        if sample.expected is not None:
            assert json.loads(right) == sample.expected


@pytest.mark.parametrize("task", ["passkey", "needle"])
def test_needles_lie_where_they_should(task: str) -> None:
    found = samples("small", 1024, tasks=(task,))
    assert {s.depth for s in found} == set(Settings().depths)
    for sample in found:
        text = tokenizer("small").decode(sample.prompt.document)
        answer = tokenizer("small").decode(sample.prompt.queries[0][1]).strip()
        assert text.index(answer) / len(text) == pytest.approx(sample.depth, abs=0.1)


def test_words_of_a_tokenizer_without_words() -> None:
    words = words_of(tokenizer("bytes"))
    assert len(words) == len(set(words)) > 1000
    assert "def" in words_of(tokenizer("small"))


def test_settings_and_lengths_are_refused_in_one_sentence() -> None:
    with pytest.raises(OptionError, match=r"Task 'words' at 60 tokens: it needs \d+ tokens more"):
        samples("small", 60, tasks=("words",))
    with pytest.raises(OptionError, match=r"Unknown task 'neddle'\. Did you mean 'needle'"):
        Settings(tasks=("neddle",))
    with pytest.raises(OptionError, match=r"depths=\(2,\) is not supported"):
        Settings(depths=(2,))
    config = tiny_model("llama", layers=1).config
    assert Settings().of_model(config).lengths == (512, 1024, 2048)
    assert Settings().of_model(config).edges == (256, 512, 1024, 2048)
    with pytest.raises(OptionError, match=r"length of 4096 is not supported; .* up to 2048"):
        Settings(lengths=(4096,)).of_model(config)
