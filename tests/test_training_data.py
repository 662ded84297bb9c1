"""What the small model is trained on: sequences with their answers weighted, batches of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from examples import train_small_model
from examples.quickstart import SMALL_MODEL
from examples.small_model_batches import BOS, LENGTHS, Batches, Corpus, Sequences
from examples.small_model_data import held_out_files, read_texts
from examples.small_model_training import WARMUP, Budget, Training, learning_rate
from examples.train_small_model import new_model


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    ids = [i for text in read_texts(held_out_files()) for i in tokenizer(text)["input_ids"][1:]]
    return Corpus(tokenizer, np.array(ids, np.uint16))


def test_answers_and_nothing_else_of_a_document_are_weighted(corpus: Corpus) -> None:
    sequences = Sequences(corpus, seed=3)
    for kind in ("recall", "tasks"):
        ids, weights = getattr(sequences, kind)(1024)
        assert len(ids) == len(weights) <= 1024
        ends = [i for i in range(1, len(ids)) if weights[i - 1] and not weights[i]]
        starts = [i for i in range(len(ids) - 1) if weights[i + 1] and not weights[i]]
        assert ends
        for start, end in zip(starts, ends, strict=False):
            answer = corpus.tokenizer.decode(ids[start + 1 : end])
            assert answer.endswith("\n")
            # What is asked for stands in the text before.
            assert answer.strip() in corpus.tokenizer.decode(ids[: start + 1]), kind


def test_text_is_a_window_behind_the_first_token(corpus: Corpus) -> None:
    ids, weights = Sequences(corpus, seed=3).text(64)
    assert corpus.tokenizer.decode(ids[:1]) == BOS
    assert weights == [1.0] * 64
    assert any(
        corpus.ids[i : i + 63].tolist() == ids[1:]
        for i in np.flatnonzero(corpus.ids[:-62] == ids[1])
    )


def test_batches_grow_with_the_curriculum(corpus: Corpus) -> None:
    batches = Batches(corpus, seed=1, tokens=4096)
    assert {b.ids.shape for b in islice(batches, 4)} == {(4096 // LENGTHS[0], LENGTHS[0])}
    batches.level.fill_(3)
    found = list(islice(batches, 12))
    assert {b.ids.shape[1] for b in found} == set(LENGTHS[1:4])
    for batch in found:
        assert batch.kinds[0] == "recall"
        assert len(batch.kinds) == len(batch.ids)
        torch.testing.assert_close(batch.weights.sum(1), torch.ones(len(batch.ids)))
    again = list(islice(batches, 12))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rates = [learning_rate(step, spent, 1.0) for step, spent in ((0, 0.0), (WARMUP, 0.6), (999, 1))]
    assert rates == [1 / WARMUP, 1.0, 0.02]


def test_training_goes_on_from_a_checkpoint(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights, momenta of both optimizers and level, and other sequences."""
    monkeypatch.setattr(train_small_model, "LAYERS", 2)
    torch.manual_seed(0)
    file, budget = tmp_path / "checkpoint.pt", Budget(tokens=8000, minutes=60)
    first = Training(new_model(corpus.tokenizer), Batches(corpus, 0, 256), peak=1e-3)
    first.progress.running["recall"] = 0.0  # learned, as far as sequences of this length go
    first.run(budget, workers=0, every=10, checkpoint=file, kept=lambda: "none")
    assert 8000 <= first.progress.tokens < 8256
    assert first.progress.level == 1
    again = Training(new_model(corpus.tokenizer), Batches(corpus, 0, 256), peak=1e-3)
    again.load(file)
    # The last checkpoint is from before the learning rate falls.
    assert 0 < again.progress.step < first.progress.step
    assert budget.spent(again.progress) < 0.7
    assert (again.batches.seed, int(again.batches.level)) == (again.progress.step, 1)
    moved = [state for optimizer in again.optimizers for state in optimizer.state.values()]
    assert len(moved) == len(list(again.model.parameters()))
    again.run(budget, workers=0, every=10, checkpoint=file, kept=lambda: "none")
    assert again.progress.step >= first.progress.step
