"""Quality by depth: what packing does to predictions, by the length of the context behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import OptionError
from kvpass.evaluate.quality import cache_size, predictions
from kvpass.evaluate.settings import Settings
from kvpass.machine import free_memory

# What is added up for each text and bucket: tokens, negative log-likelihood and divergence in
# nats, and how many of the most likely tokens are the same.
SUMS = ("tokens", "nll", "kl", "same")
# Pieces at least, if the texts have as many: of fewer, no error is known.
_LEAST_PIECES = 8
# The share of the free memory that predictions of the plain model may take.
_SHARE = 0.25


@dataclass(frozen=True)
class TextBatch:
    """Pieces of texts that are read together.

    Attributes:
        ids: ``[B, T]``; what is behind a piece's own length is not scored.
        lengths: tokens ``[B]`` of each piece; 0 for a row that fills the batch.
        texts: the number ``[B]`` of the text that a piece is from.
    """

    ids: Tensor
    lengths: Tensor
    texts: Tensor


def text_batches(
    texts: Sequence[Tensor], start: Sequence[int], settings: Settings
) -> list[TextBatch]:
    """Pieces of the length and with as many tokens to score as in the settings, if there are so
    many: one of each text, then a second one, and so on, since texts are what is independent.

    All batches have as many rows, since compiled graphs are for one number of them: the fewest that
    read the pieces in no more batches than the settings' number would, and at least half of that,
    since tasks have as many.

    Args:
        texts: token ids ``[T]`` each.
        start: token ids in front of each piece.
        settings: those of a model. A piece is twice as long as the prompt at least.

    Raises:
        OptionError: if all texts are shorter than that.
    """
    prompt, batch = settings.prompt, settings.batch
    own = settings.edges[-1] - len(start)
    cut = [[(i, piece) for piece in ids.split(own)] for i, ids in enumerate(texts)]
    rounds = (sorted(filter(None, r), key=lambda p: -len(p[1])) for r in zip_longest(*cut))
    pieces: list[tuple[int, Tensor]] = []
    scored = 0
    for i, piece in (p for r in rounds for p in r):
        if len(piece) + len(start) < 2 * prompt:
            continue
        if scored >= settings.tokens and len(pieces) >= _LEAST_PIECES:
            break
        pieces.append((i, torch.cat([torch.tensor(start, dtype=torch.long), piece])))
        scored += len(pieces[-1][1]) - prompt
    if not pieces:
        longest = max(map(len, texts), default=0)
        raise OptionError(
            f"The longest held-out text has {longest} tokens; allowed: at least {2 * prompt}, "
            "twice the prompt. Give longer texts or a smaller prompt."
        )
    pieces.sort(key=lambda p: -len(p[1]))
    rows = max(ceil(len(pieces) / ceil(len(pieces) / batch)), ceil(batch / 2))
    return [_batch(pieces[i : i + rows], rows) for i in range(0, len(pieces), rows)]


def _batch(pieces: Sequence[tuple[int, Tensor]], rows: int) -> TextBatch:
    longest = len(pieces[0][1])
    ids, lengths = torch.zeros(rows, longest, dtype=torch.long), torch.zeros(rows).long()
    texts = torch.zeros(rows, dtype=torch.long)
    for row, (text, piece) in enumerate(pieces):
        ids[row, : len(piece)] = piece
        lengths[row], texts[row] = len(piece), text
    return TextBatch(ids, lengths, texts)


class Reference:
    """Predictions of the plain model, kept if a quarter of the free memory holds all of them, else
    made anew each time.

    Attributes:
        size: see `cache_size`: of the plain cache behind the first batch that was read.
    """

    def __init__(self, model: Any, batches: Sequence[TextBatch], prompt: int) -> None:
        self._model, self._batches, self._prompt = model, batches, prompt
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        rows = sum(len(b.ids) * (b.ids.shape[1] - prompt) for b in batches)
        self._keeps = 4 * vocabulary * rows <= _SHARE * free_memory(model.device)
        self._kept: dict[int, list[Tensor]] = {}
        self.size: dict[str, Any] = {}

    def __call__(self, number: int) -> Iterator[Tensor]:
        """Log-probabilities ``[B, V]`` of each position behind the prompt of that batch."""
        kept = self._kept.get(number, [])
        if kept:
            yield from kept
            return
        ids = self._batches[number].ids.to(self._model.device)
        held = None
        for _, found, cache in predictions(self._model, ids, self._prompt):
            held = cache
            if self._keeps:
                kept.append(found)
            yield found
        self._kept[number] = kept
        self.size = self.size or cache_size(held)


def batch_sums(
    pairs: Iterable[tuple[Tensor, Tensor]], batch: TextBatch, prompt: int, edges: Sequence[int]
) -> Tensor:
    """`SUMS` of each row and bucket ``[B, buckets, 4]`` in float64.

    Args:
        pairs: for each position behind the prompt, log-probabilities ``[B, V]`` of the plain model
            and of the one that is judged.
        batch: what both have read.
        prompt: tokens in front of the first position.
        edges: a bucket is from one edge up to, but without, the next.
    """
    sums = torch.zeros(len(batch.ids), len(edges) - 1, len(SUMS), dtype=torch.float64)
    bucket = 0
    for position, (expected, found) in enumerate(pairs, prompt):
        while position >= edges[bucket + 1]:
            bucket += 1
        tokens = batch.ids[:, position, None].to(found.device)
        values = (
            torch.ones(len(found), device=found.device),
            -found.gather(1, tokens)[:, 0],
            (expected.exp() * (expected - found)).sum(1),
            (expected.argmax(1) == found.argmax(1)).float(),
        )
        scored = position < batch.lengths
        sums[scored, bucket] += torch.stack(values, dim=1).cpu().double()[scored]
    return sums
