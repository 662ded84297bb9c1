"""Answers to generated tasks, through the cache token by token."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvpass.evaluate.documents import SPARE, Sample
from kvpass.evaluate.quality import step

# For the documents and the questions of a batch: what their prefill runs in.
Chooser = Callable[[Tensor, Sequence[Tensor]], AbstractContextManager[None]]


@dataclass
class Answer:
    """How one question was answered.

    Attributes:
        right: whether greedy decoding gives the whole answer.
        logprob: of the right answer, mean over its tokens in nats.
    """

    right: bool
    logprob: float


@dataclass(frozen=True)
class _Row:
    """A question to a sample; ``free``: greedy decoding goes on from its own tokens."""

    sample: int
    query: int
    free: bool

    def tokens(self, samples: Sequence[Sample]) -> int:
        """The number of tokens of question and answer."""
        question, answer = samples[self.sample].prompt.queries[self.query]
        return len(question) + len(answer) + (SPARE if self.free else 0)


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    samples: Sequence[Sample],
    batch: int,
    chooser: Chooser | None = None,
    label: str | None = None,
) -> tuple[list[list[Answer]], Any]:
    """The answers to all questions of each sample, and the cache of the last ones.

    An answer is read token by token whatever the model predicts, which gives its probability and
    says whether greedy decoding finds it. One that has to be JSON is also decoded freely, and is
    right if ``json.loads`` makes the expected value of it.

    Args:
        model: a causal language model, compiled or not.
        tokenizer: its own.
        samples: all of one length. A document is read once, and its cache is copied for questions.
        batch: rows at a time, always as many.
        chooser: for a recipe that depends on the question: a document is read once for each.
        label: of the progress bar; None: no bar.
    """
    found = [[Answer(False, 0.0) for _ in sample.prompt.queries] for sample in samples]
    own: Any = None
    starts = range(0, len(samples), batch)
    for start in tqdm(starts, desc=label, disable=label is None, leave=False):
        group = samples[start : start + batch]
        documents = torch.stack([s.prompt.document for s in filled(group, batch)])
        cache: Any = None
        if chooser is None:
            _, cache = step(model, documents.to(model.device), None)
        for rows in _batches(group, batch):
            order = torch.tensor([row.sample for row in rows])
            if chooser is not None:
                asked = [group[row.sample].prompt.queries[row.query][0] for row in rows]
                with chooser(documents[order], asked):
                    _, own = step(model, documents[order].to(model.device), None)
            else:
                own = copy.deepcopy(cache)
                own.reorder_cache(order.to(model.device))
            read = _read(model, own, group, rows)
            for row, (answer, text) in zip(rows, read, strict=True):
                kept = found[start + row.sample]
                if row.free:
                    expected = group[row.sample].expected
                    kept[row.query].right |= _parsed(tokenizer.decode(text)) == expected
                else:
                    answer.right |= kept[row.query].right
                    kept[row.query] = answer
    return found, own


def filled(items: Sequence[Any], batch: int) -> list[Any]:
    """The items, the last one again and again up to ``batch``."""
    return [*items, *[items[-1]] * (batch - len(items))]


def _batches(samples: Sequence[Sample], batch: int) -> list[list[_Row]]:
    """Rows for all questions; those with as many tokens are read together."""
    rows = [
        _Row(i, query, free)
        for i, sample in enumerate(samples)
        for query in range(len(sample.prompt.queries))
        for free in ((False,) if sample.expected is None else (False, True))
    ]
    rows.sort(key=lambda row: -row.tokens(samples))
    return [filled(rows[i : i + batch], batch) for i in range(0, len(rows), batch)]


def _read(
    model: Any, cache: Any, samples: Sequence[Sample], rows: Sequence[_Row]
) -> list[tuple[Answer, Tensor]]:
    """For each row: the answer, and the tokens behind the question that were fed."""
    queries = [samples[row.sample].prompt.queries[row.query] for row in rows]
    steps = max(row.tokens(samples) for row in rows)
    fed = torch.zeros(len(rows), steps, dtype=torch.long)
    asked = torch.tensor([len(question) for question, _ in queries])
    for row, pair in enumerate(queries):
        fed[row, : sum(map(len, pair))] = torch.cat(pair)
    fed, free = fed.to(model.device), torch.tensor([row.free for row in rows])
    greedy, logprobs = torch.zeros_like(fed), torch.zeros(fed.shape, device=fed.device)
    for i in range(steps - 1):
        logits, cache = step(model, fed[:, i : i + 1], cache)
        greedy[:, i + 1] = logits.argmax(1)
        own = (free & (i + 1 >= asked)).to(fed.device)
        fed[:, i + 1] = fed[:, i + 1].where(~own, greedy[:, i + 1])
        logprobs[:, i + 1] = logits.log_softmax(1).gather(1, fed[:, i + 1, None])[:, 0]
    fed, greedy, logprobs = fed.cpu(), greedy.cpu(), logprobs.cpu()
    found = []
    for row, (question, answer) in enumerate(queries):
        span = slice(len(question), len(question) + len(answer))
        right = bool((greedy[row, span] == answer).all())
        found.append((Answer(right, float(logprobs[row, span].mean())), fed[row, len(question) :]))
    return found


def _parsed(text: str) -> Any:
    """The first JSON value of a text; None if it does not begin with one."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except ValueError:
        return None
