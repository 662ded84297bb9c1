"""Quality in buckets of context lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvpass.errors import OptionError
from kvpass.evaluate import Settings, depth, quality
from kvpass.evaluate.depth import Reference, batch_sums, text_batches
from kvpass.evaluate.quality import predictions
from tests.harness import compiled
from tests.models import prompt, tiny_model

PROMPT, EDGES = 24, (24, 32, 48, 60)


def settings(batch: int, length: int = 60, tokens: int = 1) -> Settings:
    return Settings(prompt=PROMPT, length=length, tokens=tokens, batch=batch)


def sums(model: Any, judged: Any, batch: depth.TextBatch) -> torch.Tensor:
    with torch.no_grad():
        found = (p for _, p, _ in predictions(judged, batch.ids, PROMPT))
        pairs = zip(Reference(model, [batch], PROMPT)(0), found, strict=True)
        return batch_sums(pairs, batch, PROMPT, EDGES)


def test_sums_add_up_to_what_quality_measures() -> None:
    model = tiny_model("llama", layers=1)
    texts = [prompt(1, 60, seed)[0] for seed in range(2)]
    (batch,) = text_batches(texts, [], settings(6))
    twin = compiled(model, "kivi-2bit", residual=16, group=16)
    found = sums(model, twin, batch)
    tokens, nll, kl, same = found.sum((0, 1))
    wanted = quality(twin, texts, PROMPT, reference=model)
    assert tokens == 2 * 36
    assert math.exp(nll / tokens) == pytest.approx(wanted.perplexity, rel=1e-4)
    assert kl / tokens == pytest.approx(wanted.divergence, rel=1e-3)
    assert kl / tokens > 1e-4
    assert 0 < same < tokens
    assert found[..., 0].tolist() == [[8, 16, 12], [8, 16, 12], [0, 0, 0]]


def test_a_model_does_not_diverge_from_itself_and_short_rows_end() -> None:
    model = tiny_model("llama", layers=1)
    texts = [prompt(1, length, seed)[0] for seed, length in enumerate((60, 50))]
    (batch,) = text_batches(texts, [], settings(2))
    tokens, nll, kl, same = sums(model, model, batch).unbind(-1)
    assert tokens.tolist() == same.tolist() == [[8, 16, 12], [8, 16, 2]]
    assert kl.abs().max() == 0
    alone = quality(model, [texts[1]], PROMPT)
    assert math.exp(nll[1].sum() / 26) == pytest.approx(alone.perplexity, rel=1e-4)


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_reference_repeats_itself_kept_or_not(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "free_memory", lambda _: free)
    model, calls = tiny_model("llama", layers=1), []
    model.register_forward_hook(lambda *_: calls.append(1))
    batches = text_batches([prompt(1, 60)[0]], [], settings(1))
    reference = Reference(model, batches, PROMPT)
    with torch.no_grad():
        first, second = (torch.stack(list(reference(0))) for _ in range(2))
    assert torch.equal(first, second)
    assert len(calls) == (36 if free else 72)
    assert reference.size["cached"] == 59


def test_pieces_are_of_all_texts_first() -> None:
    texts = [torch.arange(300), torch.arange(1000, 1150), torch.arange(2000, 2040)]
    (batch,) = text_batches(texts, [7], settings(12, length=101, tokens=150))
    # No more than eight pieces, though fewer have as many tokens to score, and half of the rows.
    assert batch.texts[:5].tolist() == [0, 1, 0, 0, 1]
    assert batch.lengths.tolist() == [101, 101, 101, 101, 51, 0]
    assert batch.ids[1, :3].tolist() == [7, 1000, 1001]
    assert batch.ids[4, 50:52].tolist() == [1149, 0]


def test_batches_have_as_many_rows() -> None:
    batches = text_batches([torch.arange(900)], [], settings(8, length=100, tokens=900))
    assert [batch.lengths.tolist() for batch in batches] == [[100] * 5, [100] * 4 + [0]]


def test_texts_that_are_too_short_are_refused() -> None:
    with pytest.raises(OptionError, match=r"longest held-out text has 40 tokens; .* least 48"):
        text_batches([torch.arange(40)], [], settings(1))
