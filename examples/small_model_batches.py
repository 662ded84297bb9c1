"""Batches for the small model: the tokens of library texts, and what is made of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from examples.small_model_data import (
    RecallDocument,
    encode,
    package_texts,
    read_texts,
    recall_document,
    training_files,
)
from kvpass.evaluate.documents import Writer
from kvpass.evaluate.tasks import TASKS

if TYPE_CHECKING:
    import numpy as np

Ids = list[int]
Weights = list[float]

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
BOS = "<s>"
# The curriculum: as soon as recall is learned at the longest length so far, the next one joins.
LENGTHS = (48, 128, 512, 1024, 2048, MAX_POSITIONS)
# A sequence is library text, recall, or documents of the tasks of `kvpass eval`, this often.
SHARES = {"text": 0.5, "recall": 0.25, "tasks": 0.25}
# The shortest document that every task fits into, and the shortest sequence with tasks.
SHORTEST_TASK = 320
# Recall has batches of its own.
TASK_NAMES = tuple(name for name in TASKS if name != "recall")
# Pieces that tokens never cross: an assignment sign, one digit, a word, signs, white space.
WORDS = r" = |\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Every so many texts the tokenizer learns from one.
TOKENIZER_SHARE = 8
# Library text for fillers: so many pieces, of so many tokens.
FILLERS, FILLER_TOKENS = 256, 1024


def train_tokenizer(texts: Sequence[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer that keeps every digit apart and puts ``<s>`` first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
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


@dataclass(frozen=True)
class Corpus:
    """Library texts as tokens, and the tokenizer that was trained on them."""

    tokenizer: Any
    ids: np.ndarray[Any, Any]

    @classmethod
    def of(cls, folder: Path) -> Corpus:
        """The corpus kept in ``folder``; made there of what is installed if there is none."""
        import numpy as np
        from transformers import AutoTokenizer

        file = folder / "tokens.npz"
        if not file.exists():
            texts = [*read_texts(training_files()), *package_texts()]
            tokenizer = train_tokenizer(texts[::TOKENIZER_SHARE])
            found = tokenizer.backend_tokenizer.encode_batch_fast(texts)
            ids = np.concatenate([np.array(text.ids, np.uint16) for text in found])
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer.save_pretrained(folder)
            np.savez_compressed(file, ids=ids)
        with np.load(file) as arrays:
            return cls(AutoTokenizer.from_pretrained(folder), arrays["ids"])

    def window(self, rng: random.Random, length: int) -> Ids:
        """So many tokens in a row from anywhere."""
        start = rng.randrange(len(self.ids) - length)
        window: Ids = self.ids[start : start + length].tolist()
        return window


def recall_sequence(
    tokenizer: Any, document: RecallDocument, length: int = MAX_POSITIONS
) -> tuple[Ids, Weights]:
    """The ids of ``document`` with all its queries answered, cut to ``length``, and weights.

    A weight is 1 for the tokens of an answer and for the line end after it, and 0 elsewhere.
    """
    ids: Ids = tokenizer.encode(document.text)
    weights = [0.0] * len(ids)
    for i, answer in enumerate(document.answers):
        for text, weight in ((document.prompt(i), 0.0), (f"{answer}\n", 1.0)):
            part = encode(tokenizer, text)
            ids += part
            weights += [weight] * len(part)
    return ids[:length], weights[:length]


class Sequences:
    """Sequences to train on, made from one seed: ids, and the weight of each in the loss."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        """Takes pieces of the corpus for fillers."""
        self.corpus, self.tokenizer = corpus, corpus.tokenizer
        self.rng = random.Random(seed)
        pieces = [corpus.window(self.rng, FILLER_TOKENS) for _ in range(FILLERS)]
        texts = self.tokenizer.batch_decode(pieces, skip_special_tokens=True)
        self.lines = [line for text in texts for line in text.splitlines(keepends=True)]
        self.writer = Writer(self.tokenizer, texts)
        self.line_end = encode(self.tokenizer, "\n")

    def text(self, length: int) -> tuple[Ids, Weights]:
        """A random window of library text after ``<s>``, all of it weighted 1."""
        window = self.corpus.window(self.rng, length - 1)
        return [self.tokenizer.bos_token_id, *window], [1.0] * length

    def recall(self, length: int) -> tuple[Ids, Weights]:
        """A recall document over 30 to 90 % of ``length``, one in four with library lines."""
        n_tokens = int(length * self.rng.uniform(0.3, 0.9))
        filler: list[str] = []
        if self.rng.random() < 0.25:
            start = self.rng.randrange(len(self.lines))
            filler = [line for line in self.lines[start : start + 200] if len(line) < 100]
        document = recall_document(
            self.rng,
            self.tokenizer,
            n_tokens,
            n_queries=(length - n_tokens) // 7 + 2,
            filler=filler,
        )
        return recall_sequence(self.tokenizer, document, length)

    def tasks(self, length: int) -> tuple[Ids, Weights]:
        """Documents of tasks with their questions answered, until ``length`` is reached."""
        ids: Ids = []
        weights: Weights = []
        while length - len(ids) >= SHORTEST_TASK:
            left = length - len(ids)
            tokens = int(
                SHORTEST_TASK * math.exp(self.rng.random() * math.log(left / SHORTEST_TASK))
            )
            make, _ = TASKS[self.rng.choice(TASK_NAMES)]
            story = make(self.rng, self.writer.words, self.rng.random())
            question, answer = self.writer.asked(*story.asked[0])
            answer = [*answer, *self.line_end]
            room = tokens - len(question) - len(answer)
            document = self.writer.document(story, room, self.rng)
            ids += [*document, *question, *answer]
            weights += [0.0] * (room + len(question)) + [1.0] * len(answer)
        return ids, weights


@dataclass(frozen=True)
class Batch:
    """Ids and weights of some sequences of one length, and which of them are recall.

    The weights of every sequence sum to 1.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    kinds: tuple[str, ...]


class Batches(torch.utils.data.IterableDataset[Batch]):
    """Batches without end; each worker of a loader has a seed of its own.

    Attributes:
        level: how many of `LENGTHS` but one are drawn from; shared with workers.
    """

    def __init__(self, corpus: Corpus, seed: int, tokens: int) -> None:
        """``tokens`` are those of a batch at most, but there are always two sequences."""
        self.corpus, self.seed, self.tokens = corpus, seed, tokens
        self.level = torch.zeros((), dtype=torch.long).share_memory_()

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        sequences = Sequences(self.corpus, 1000 * self.seed + (worker.id if worker else 0))
        while True:
            level = int(self.level)
            yield self._batch(sequences, sequences.rng.choice(LENGTHS[min(level, 1) : level + 1]))

    def _batch(self, sequences: Sequences, length: int) -> Batch:
        """All sequences of the first length are recall, because looking things up is learned
        sooner without the text; every batch has some."""
        size = max(2, self.tokens // length)
        names = [name for name in SHARES if name != "tasks" or length > SHORTEST_TASK]
        drawn = sequences.rng.choices(names, [SHARES[name] for name in names], k=size - 1)
        kinds = ("recall",) * size if length == LENGTHS[0] else ("recall", *drawn)
        ids, weights = torch.zeros(size, length, dtype=torch.long), torch.zeros(size, length)
        for row, kind in enumerate(kinds):
            tokens, weight = getattr(sequences, kind)(length)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, : len(weight)] = torch.tensor(weight)
        return Batch(ids, weights / weights.sum(1, keepdim=True), kinds)
