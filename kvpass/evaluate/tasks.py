"""Generated tasks: what stands in a document, and what is asked about it. No tokenizer is needed:
`kvpass.evaluate.documents` makes token ids of them.

Passkey: Mohtashami and Jaggi (2023). Needle: Kamradt (2023). ``multi-key``, ``multi-value``,
``multi-query``, ``variables`` (variable tracking) and ``words`` (common words extraction): RULER,
Hsieh et al. (2024), with as few words around them as a small model follows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

# What RULER places by default: keys, values, queries; hops of a chain of variables.
_MANY, _HOPS = 4, 4
# Words that are common, and how often each occurs; any other word occurs a tenth as often.
_COMMON, _OFTEN = 3, 10
_QUESTIONS = 8


@dataclass(frozen=True)
class Story:
    """A document to be, and what is asked about it.

    Attributes:
        lines: each with its place in the document, from 0 to 1.
        asked: questions and answers; an answer goes directly behind its question.
        filler: lines to put between; None: texts.
        expected: the value that the only answer is the JSON of, for a task that is about its form.
    """

    lines: Sequence[tuple[float, str]]
    asked: Sequence[tuple[str, str]]
    filler: Iterator[str] | None = None
    expected: Any = None


# Makes a story of random numbers, words and a depth.
Task = Callable[[random.Random, Sequence[str], float], Story]


def passkey(rng: random.Random, _: Sequence[str], depth: float) -> Story:
    """A number said twice in one line."""
    number = _number(rng, 5)
    line = f"The pass key is {number}. Remember it. {number} is the pass key.\n"
    return Story([(depth, line)], [("What is the pass key? The pass key is ", f"{number}")])


def needle(rng: random.Random, words: Sequence[str], depth: float) -> Story:
    """One key and its number."""
    return _needles(rng, words, [depth], keys=1, asks=1)


def multi_key(rng: random.Random, words: Sequence[str], _: float) -> Story:
    """Several keys with a number each; one is asked for."""
    return _needles(rng, words, _places(rng, _MANY), keys=_MANY, asks=1)


def multi_value(rng: random.Random, words: Sequence[str], _: float) -> Story:
    """Several numbers of one key, asked for in their order."""
    return _needles(rng, words, _places(rng, _MANY), keys=1, asks=1)


def multi_query(rng: random.Random, words: Sequence[str], _: float) -> Story:
    """Several keys with a number each, all asked for in one question."""
    return _needles(rng, words, _places(rng, _MANY), keys=_MANY, asks=_MANY)


def variables(rng: random.Random, _: Sequence[str], __: float) -> Story:
    """A chain of variables, each assigned the one before; all that hold a number are asked for."""
    names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(_HOPS + 1)]
    number = _number(rng, 5)
    values = [number, *(f"VAR {name}" for name in names)]
    lines = [f"VAR {name} = {value}\n" for name, value in zip(names, values, strict=False)]
    question = f"Find all variables that are assigned the value {number}. They are: "
    return Story(
        list(zip(_places(rng, len(lines)), lines, strict=True)),
        [(question, ", ".join(names))],
    )


def common_words(rng: random.Random, words: Sequence[str], _: float) -> Story:
    """A list of words, some of which occur ten times as often as any other."""
    chosen = rng.sample(words, len(words))
    common = sorted(chosen[:_COMMON])
    lines = [(rng.random(), f"{word}\n") for word in common for _ in range(_OFTEN)]
    question = f"The {_COMMON} most common words in the list, in alphabetical order, are: "
    others = _names(chosen[_COMMON:])
    return Story(lines, [(question, ", ".join(common))], (f"{word}\n" for word in others))


def json_object(rng: random.Random, words: Sequence[str], depth: float) -> Story:
    """A JSON object to be copied exactly."""
    name, city, *tags = rng.sample(words, 4)
    value = {
        "name": name,
        "id": rng.randrange(10**5),
        "tags": tags,
        "place": {"city": city, "open": rng.random() < 0.5, "score": rng.randrange(100) / 10},
    }
    return _copied("Record", rng, value, depth)


def tool_call(rng: random.Random, words: Sequence[str], depth: float) -> Story:
    """A call of a tool, as chat templates write it, to be repeated exactly."""
    verb, noun, city, day = rng.sample(words, 4)
    arguments = {"city": city, "day": day, "limit": rng.randrange(100)}
    return _copied("Call", rng, {"name": f"{verb}_{noun}", "arguments": arguments}, depth)


def recall(rng: random.Random, words: Sequence[str], _: float) -> Story:
    """Nothing but names with a number each; several are asked for."""
    names = _names(rng.sample(words, len(words)))
    asked = [(next(names), _number(rng, 4)) for _ in range(_QUESTIONS)]
    lines = [f"{name} = {number}\n" for name, number in asked]
    return Story(
        list(zip(_places(rng, len(lines)), lines, strict=True)),
        [(f"{name} = ", number) for name, number in asked],
        (f"{name} = {_number(rng, 4)}\n" for name in names),
    )


# By name; and whether the task is asked at all depths.
TASKS: dict[str, tuple[Task, bool]] = {
    "passkey": (passkey, True),
    "needle": (needle, True),
    "multi-key": (multi_key, False),
    "multi-value": (multi_value, False),
    "multi-query": (multi_query, False),
    "variables": (variables, False),
    "words": (common_words, False),
    "json": (json_object, False),
    "tool": (tool_call, False),
    "recall": (recall, False),
}


def _number(rng: random.Random, digits: int) -> str:
    """Digits, the first of which is not 0."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _places(rng: random.Random, number: int) -> list[float]:
    return sorted(rng.random() for _ in range(number))


def _names(words: Sequence[str]) -> Iterator[str]:
    """All words, then all pairs of them, then with a number behind."""
    pairs = (f"{a}_{b}" for a in words for b in words)
    numbered = (f"{word}_{i}" for i in count() for word in words)
    return chain(words, pairs, numbered)


def _needles(
    rng: random.Random, words: Sequence[str], places: Sequence[float], keys: int, asks: int
) -> Story:
    """A line at each place; keys take turns, and ``asks`` of them are asked for at once."""
    names = ["-".join(pair) for pair in zip(*[iter(rng.sample(words, 2 * keys))] * 2, strict=True)]
    found = [(names[i % keys], _number(rng, 7)) for i in range(len(places))]
    lines = [f"The special magic number for {key} is: {number}.\n" for key, number in found]
    chosen = sorted(rng.sample(names, asks), key=names.index)
    numbers = [number for key, number in found if key in chosen]
    what, verb = ("number", "is") if len(numbers) == 1 else ("numbers", "are")
    # The space ends the question: what follows it begins as in the document.
    question = f"The special magic {what} for {' and '.join(chosen)} {verb}: "
    return Story(list(zip(places, lines, strict=True)), [(question, ", ".join(numbers))])


def _copied(kind: str, rng: random.Random, value: Any, depth: float) -> Story:
    text, label = json.dumps(value), f"{kind} {_number(rng, 3)}: "
    return Story([(depth, f"{label}{text}\n")], [(label, text)], expected=value)
