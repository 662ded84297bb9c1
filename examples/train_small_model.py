"""Train the small language model that the examples use, from scratch, on a CPU.

The model learns two things at once: the source text of Python's own standard library, and a
recall task in which a document of ``name = value`` lines must be remembered exactly.  Recall
over a thousand tokens only works if the keys and values held in the cache are good, which is
what makes the model useful for trying out ways of storing that cache in fewer bits.

Run ``python examples/train_small_model.py`` from the root of the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

DEFAULT_OUT = Path(__file__).resolve().parent / "small_model"
SKIPPED_FOLDERS = frozenset({"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
BOS = "<s>"


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum: ``steps`` updates on ``batch`` sequences of ``length`` tokens."""

    length: int
    batch: int
    steps: int


STAGES = (
    Stage(length=128, batch=16, steps=1500),
    Stage(length=256, batch=8, steps=1500),
    Stage(length=512, batch=4, steps=1500),
    Stage(length=1024, batch=2, steps=2000),
    Stage(length=2048, batch=2, steps=1000),
)


@dataclass(frozen=True)
class RecallDocument:
    """A document to remember, and what is asked about it afterwards.

    ``text`` is made of lines ``name = value``.  Query ``i`` is right when a model that has read
    ``text`` followed by ``prompt(i)`` continues with ``answers[i]``.
    """

    text: str
    names: tuple[str, ...]
    answers: tuple[str, ...]

    def prompt(self, i: int) -> str:
        """The text that asks query ``i``; it goes directly after ``text``."""
        return f"{self.names[i]} = "


# ---------------------------------------------------------------------------------------------
# Data


def _library_files() -> Iterator[tuple[Path, bool]]:
    """Every source file used, in a fixed order, with whether it is held out of training."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            digest = hashlib.sha256(relative.as_posix().encode()).digest()
            yield path, digest[0] < 8  # 8 of 256: about 3 % of the files


def held_out_files() -> list[Path]:
    """The standard library files the model never saw in training, in a fixed order."""
    return [path for path, held_out in _library_files() if held_out]


def training_files() -> list[Path]:
    """The standard library files the model is trained on, in a fixed order."""
    return [path for path, held_out in _library_files() if not held_out]


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The text of each file that is valid UTF-8 and not empty."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            texts.append(text)
    return texts


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer that keeps every digit apart and puts ``<s>`` first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of ``text`` without the leading ``<s>``."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def recall_names(tokenizer: Any) -> list[str]:
    """The names the recall task uses: lower-case words that are one token, in a fixed order."""
    return sorted(
        token
        for token in tokenizer.get_vocab()
        if len(token) >= 3 and token.isascii() and token.isalpha() and token.islower()
    )


def recall_document(
    rng: random.Random,
    tokenizer: Any,
    n_tokens: int,
    n_queries: int = 16,
    n_digits: int = 4,
    filler: Sequence[str] = (),
) -> RecallDocument:
    """A random document of at most ``n_tokens`` tokens, and ``n_queries`` questions about it.

    Every line is ``name = value`` with a name that occurs once and a value of ``n_digits``
    random digits.  The document is as long as whole lines allow; the leading ``<s>`` counts.
    With ``filler`` (lines that end in a newline), about half of the lines are taken from it, in
    order, until it is used up.  The queried names are drawn uniformly from all of the document,
    without repetition as long as there are enough of them.
    """
    names = recall_names(tokenizer)
    rng.shuffle(names)
    waiting, lines, values, left = list(reversed(filler)), [], dict[str, str](), n_tokens - 1
    while True:
        if waiting and rng.random() < 0.5:
            line = waiting.pop()
        elif names:
            name = names.pop()
            values[name] = f"{rng.randrange(10**n_digits):0{n_digits}d}"
            line = f"{name} = {values[name]}\n"
        else:
            raise ValueError(f"too few names for a document of {n_tokens} tokens")
        left -= len(encode(tokenizer, line))
        if left < 0:
            break
        lines.append(line)
    if not waiting or line != filler[len(filler) - len(waiting) - 1]:
        values.pop(line.split(" ")[0], None)
    asked: list[str] = []
    while len(asked) < n_queries:
        asked += rng.sample(sorted(values), min(len(values), n_queries - len(asked)))
    return RecallDocument("".join(lines), tuple(asked), tuple(values[name] for name in asked))
