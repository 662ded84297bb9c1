"""Documents of an exact number of tokens, made of a task's lines and a filler."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch

from kvpass.errors import OptionError
from kvpass.evaluate.quality import RecallPrompt
from kvpass.evaluate.settings import Settings
from kvpass.evaluate.tasks import TASKS, Story

# Tokens that an answer may be longer than the right one, if it is judged by its meaning.
SPARE = 8
# Tokens of a line at most: where a filler can be parted.
_LINE = 64
# Of these a filler is made if there are no texts (Mohtashami and Jaggi, 2023).
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
_LEAST_WORDS = 200

Ids = list[int]


@dataclass(frozen=True)
class Sample:
    """A document of a task, with its questions.

    Attributes:
        task: its name in `TASKS`.
        length: tokens of document, longest question and answer together.
        depth: where the needle lies; None for a task without.
        prompt: the document, always of the same length, and the questions.
        expected: see `Story`.
    """

    task: str
    seed: int
    length: int
    depth: float | None
    prompt: RecallPrompt
    expected: Any = None


class Writer:
    """Makes documents for one tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: for fillers; none: a few sentences, again and again.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        lines = [f"{line}\n" for text in texts for line in text.splitlines() if line.strip()]
        self._filler = lines or [_FILLER]
        self.start = start_ids(tokenizer)
        self.words = words_of(tokenizer)

    def samples(self, settings: Settings, length: int) -> list[Sample]:
        """The samples of all tasks and seeds at a length.

        Raises:
            OptionError: if the tasks do not fit into it.
        """
        stories: list[tuple[str, int, float | None, Story]] = []
        for task, seed in product(settings.tasks, range(settings.seeds)):
            make, has_depths = TASKS[task]
            for depth in settings.depths if has_depths else (None,):
                rng = random.Random(f"{task} {seed} {depth} {length}")
                story = make(rng, self.words, rng.random() if depth is None else depth)
                stories.append((task, seed, depth, story))
        asked = [[self.asked(*pair) for pair in story.asked] for *_, story in stories]
        ends = [len(q) + len(a) for pairs in asked for q, a in pairs]
        room = length - SPARE - max(ends, default=0)
        found = []
        for (task, seed, depth, story), pairs in zip(stories, asked, strict=True):
            rng = random.Random(f"filler {task} {seed} {depth} {length}")
            try:
                ids = self.document(story, room, rng)
            except OptionError as error:
                raise OptionError(f"Task '{task}' at {length} tokens: {error}") from None
            queries = tuple((torch.tensor(q), torch.tensor(a)) for q, a in pairs)
            prompt = RecallPrompt(torch.tensor(ids), queries)
            found.append(Sample(task, seed, length, depth, prompt, story.expected))
        return found

    def ids(self, text: str) -> Ids:
        """Token ids of a text, without what the tokenizer puts around it."""
        # Texts may be longer than the model reads at once, of which the tokenizer warns.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def asked(self, question: str, answer: str) -> tuple[Ids, Ids]:
        """Ids of both as they are encoded together. A token that reaches from one into the other
        is the answer's."""
        alone, both = self.ids(question), self.ids(question + answer)
        shared = next((i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b),
                      min(len(alone), len(both) - 1))  # fmt: skip
        return both[:shared], both[shared:]

    def document(self, story: Story, room: int, rng: random.Random) -> Ids:
        """``room`` tokens: the lines at their places, and filler between. The first line of filler
        may lack its beginning."""
        lines = [(place, self.ids(text)) for place, text in sorted(story.lines)]
        free = room - len(self.start) - sum(len(ids) for _, ids in lines)
        if free < 0:
            raise OptionError(f"it needs {-free} tokens more; ask for longer documents.")
        filler = self._filling(story.filler or self._texts(rng), free)
        ends = [0, *accumulate(map(len, filler))]
        parts = [*filler]
        # From the back, so that positions in front stay what they are.
        for place, ids in reversed(lines):
            wanted = place * free
            after = bisect_left(ends, wanted)
            if after and wanted - ends[after - 1] < ends[after] - wanted:
                after -= 1
            parts.insert(after, ids)
        return [*self.start, *(token for part in parts for token in part)]

    def _filling(self, lines: Iterator[str], free: int) -> list[Ids]:
        """Lines of ``free`` tokens together."""
        found: list[Ids] = []
        missing = free
        while missing > 0:
            ids = self.ids(next(lines))
            found += [ids[i : i + _LINE] for i in range(0, len(ids), _LINE)]
            missing -= len(ids)
        # The end is a whole line: a question follows it.
        while missing < 0:
            first = found.pop(0)
            missing += len(first)
            if missing > 0:
                found.insert(0, first[-missing:])
                missing = 0
        return found

    def _texts(self, rng: random.Random) -> Iterator[str]:
        """Lines of the texts from anywhere on, without end."""
        first = rng.randrange(len(self._filler))
        while True:
            yield from self._filler[first:]
            first = 0


def start_ids(tokenizer: Any) -> Ids:
    """The token that begins a text, if the tokenizer puts one there."""
    first: Ids = list(tokenizer("a")["input_ids"])[:1]
    return first if first == [tokenizer.bos_token_id] else []


def words_of(tokenizer: Any) -> list[str]:
    """Lower-case words of three letters or more that are one token, in a fixed order; syllables
    where a tokenizer has few."""
    tokens = (token.lstrip("Ġ▁ ") for token in tokenizer.get_vocab())
    words = {t for t in tokens if len(t) > 2 and t.isascii() and t.isalpha() and t.islower()}
    if len(words) < _LEAST_WORDS:
        syllables = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]
        words = {"".join(pair) for pair in product(syllables, repeat=2)}
    return sorted(words)
