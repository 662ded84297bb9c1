"""What the small model learns from, and what it is asked: library texts and recall documents."""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "testing", "idle_test", "encodings", "pydoc_data"}
)
# Of an installed package at most so much is learned, of a file too, and no file that shares more
# than this part of its long lines with held-out files: packages carry copies of library modules.
PACKAGE_BYTES, FILE_BYTES = 4_000_000, 200_000
LONG_LINE, MOST_SHARED = 30, 0.05


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


def _library_files() -> Iterator[tuple[Path, bool]]:
    """Every source file used, in a fixed order, with whether it is held out of training."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_sources(root, root)):
        yield path, _digest(path.relative_to(root))[0] < 8  # 8 of 256: about 3 % of the files


def _sources(folder: Path, root: Path) -> Iterator[Path]:
    """Source files under ``folder`` but for those in skipped folders below ``root``."""
    for path in folder.rglob("*.py"):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
            yield path


def held_out_files() -> list[Path]:
    """The standard library files the model never saw in training, in a fixed order."""
    return [path for path, held_out in _library_files() if held_out]


def training_files() -> list[Path]:
    """The standard library files the model is trained on, in a fixed order."""
    return [path for path, held_out in _library_files() if not held_out]


def package_texts() -> list[str]:
    """Texts of the sources of installed packages, in a fixed order, each text once."""
    root = Path(sysconfig.get_paths()["purelib"])
    held_out = {line for text in read_texts(held_out_files()) for line in _long_lines(text)}
    found: dict[str, None] = {}
    for package in sorted(path for path in root.iterdir() if path.is_dir()):
        room = PACKAGE_BYTES
        files = [p for p in _sources(package, root) if p.stat().st_size <= FILE_BYTES]
        for path in sorted(files, key=lambda path: _digest(path.relative_to(root))):
            if (size := path.stat().st_size) > room:
                break
            texts = read_texts([path])
            lines = [line for text in texts for line in _long_lines(text)]
            if lines and sum(line in held_out for line in lines) <= MOST_SHARED * len(lines):
                found.update(dict.fromkeys(texts))
                room -= size
    return list(found)


def _long_lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if len(line) >= LONG_LINE]


def _digest(relative: Path) -> bytes:
    return hashlib.sha256(relative.as_posix().encode()).digest()


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


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of ``text`` without the leading ``<s>``."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@functools.cache
def recall_names(tokenizer: Any) -> tuple[str, ...]:
    """The names the recall task uses: lower-case words that are one token, in a fixed order."""
    words = (token for token in tokenizer.get_vocab() if token.isascii() and token.isalpha())
    return tuple(sorted(word for word in words if len(word) >= 3 and word.islower()))


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
    With ``filler`` (lines that end in a newline), half of the lines but the first come from it, in
    order, until it is used up.  The queried names are drawn uniformly from all of the document,
    without repetition as long as there are enough of them.
    """
    names = list(recall_names(tokenizer))
    rng.shuffle(names)
    waiting = list(reversed(filler))
    lines: list[str] = []
    values: dict[str, str] = {}
    left = n_tokens - 1
    while True:
        name = ""
        if waiting and values and rng.random() < 0.5:
            line = waiting.pop()
        elif names:
            name, value = names.pop(), f"{rng.randrange(10**n_digits):0{n_digits}d}"
            line = f"{name} = {value}\n"
        else:
            raise ValueError(f"too few names for a document of {n_tokens} tokens")
        left -= len(encode(tokenizer, line))
        if left < 0:
            break
        lines.append(line)
        if name:
            values[name] = value
    if not values:
        raise ValueError(f"no line fits into a document of {n_tokens} tokens")
    asked: list[str] = []
    while len(asked) < n_queries:
        asked += rng.sample(list(values), min(len(values), n_queries - len(asked)))
    return RecallDocument("".join(lines), tuple(asked), tuple(values[name] for name in asked))


def main() -> None:
    """Prints the held-out files; ``--training N``: instead N of the others, evenly spread, with
    commas between them."""
    parser = argparse.ArgumentParser(description="Texts held out of the small model's training.")
    parser.add_argument("--training", type=int, metavar="N", help="N files that it has seen")
    count = parser.parse_args().training
    if count is None:
        print("\n".join(map(str, held_out_files())))
    else:
        files = training_files()
        print(",".join(map(str, files[:: max(1, len(files) // count)])))


if __name__ == "__main__":
    main()
