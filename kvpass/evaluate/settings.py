"""`Settings`: what of a model is measured, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpass.errors import OptionError, check, check_choice, check_whole, is_number, unknown
from kvpass.evaluate.tasks import TASKS
from kvpass.options import INNER

# Of texts, unless more is asked for: steps are tokens, and there are as many as a piece is long.
_LONGEST = 8192
# Of a config that names no limit.
_UNKNOWN_LIMIT = 2048
_SHORTEST = 512


@dataclass(frozen=True)
class Settings:
    """What is measured. Lengths are in tokens.

    Attributes:
        prompt: tokens of each piece of text that are prefilled and not scored.
        length: tokens of a piece of text at most; None: what the model supports, at most 8,192.
        tokens: tokens to score at least, where the texts allow.
        batch: the most sequences at a time, of texts and of documents.
        tasks: names of `TASKS`; none: texts are scored alone.
        lengths: tokens of a task's document, its question and its answer together; None: powers of
            two from 512 to ``length``.
        depths: where in a document a needle lies, 0 to 1, for the tasks that have one.
        seeds: documents are drawn anew for each.
        samples: pieces of 1,024 tokens that calibrated recipes see.
        inner: what compiles the rewritten graphs: ``inductor`` or ``eager``.

    Raises:
        OptionError: if a value is not allowed.
    """

    prompt: int = 256
    length: int | None = None
    tokens: int = 32768
    batch: int = 24
    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.0, 0.33, 0.67, 1.0)
    seeds: int = 3
    samples: int = 16
    inner: str = "inductor"

    def __post_init__(self) -> None:
        for name in ("prompt", "tokens", "batch", "seeds", "samples"):
            check_whole(name, getattr(self, name), 2 if name == "prompt" else 1)
        if self.length is not None:
            check_whole("length", self.length, 2 * self.prompt)
        for task in self.tasks:
            if task not in TASKS:
                raise OptionError(unknown("task", task, TASKS))
        for length in self.lengths or ():
            check_whole("lengths", length, 1)
        fits = len(self.depths) > 0 and all(is_number(d) and 0 <= d <= 1 for d in self.depths)
        check("depths", self.depths, fits, "numbers from 0 to 1")
        check_choice("inner", self.inner, INNER)

    def of_model(self, config: Any) -> Settings:
        """The same, with the lengths that a model with this transformers config allows.

        Raises:
            OptionError: if a length is more than the model supports.
        """
        text = config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        length = self.length or max(min(limit or _UNKNOWN_LIMIT, _LONGEST), 2 * self.prompt)
        lengths = self.lengths or doubled(min(_SHORTEST, length), length)
        if limit is not None and (longest := max(length, *lengths)) > limit:
            raise OptionError(
                f"A length of {longest} is not supported; allowed: up to {limit} tokens, the "
                "model's max_position_embeddings."
            )
        return replace(self, length=length, lengths=tuple(lengths))

    @property
    def edges(self) -> tuple[int, ...]:
        """Ends of the buckets of context lengths: the prompt, twice as much, and so on up to
        ``length``."""
        assert self.length is not None
        return tuple(doubled(self.prompt, self.length))


def doubled(first: int, last: int) -> Sequence[int]:
    """``first``, twice as much, and so on, and ``last``."""
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return found if first == last else [*found, last]
