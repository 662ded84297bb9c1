"""Perplexity and recall run through the cache, and equal what they are defined as."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

import kvpass
from kvpass import recipe
from kvpass.errors import OptionError
from kvpass.evaluate import (
    RecallPrompt,
    cache_bytes,
    first_difference,
    perplexity,
    quality,
    recall_accuracy,
)
from tests.harness import compiled, oracle, run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", residual=16, group=16)


def test_perplexity_without_packing_is_the_dense_one() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 60)[0]
    with torch.no_grad():
        scores = model(ids[None]).logits[0].log_softmax(-1)
    wanted = math.exp(-float(scores[39:59].gather(1, ids[40:60, None]).mean()))
    assert perplexity(model, [ids], 40) == pytest.approx(wanted, rel=1e-5)


def test_perplexity_through_packed_cache_is_the_oracles() -> None:
    model = tiny_model("llama")
    texts = [prompt(1, 60, seed)[0] for seed in (1, 2)]
    wanted = perplexity(model, texts, 40, new_cache=lambda: oracle(model, KIVI))
    assert perplexity(compiled(model, KIVI), texts, 40) == pytest.approx(wanted, rel=1e-5)
    assert perplexity(model, texts, 40) != pytest.approx(wanted, rel=1e-5)


def test_texts_of_one_length_can_be_read_together() -> None:
    model = tiny_model("llama")
    texts = [prompt(1, length, seed)[0] for seed, length in enumerate((60, 60, 60, 50))]
    wanted = perplexity(model, texts, 40, new_cache=lambda: oracle(model, KIVI))
    found = perplexity(model, texts, 40, new_cache=lambda: oracle(model, KIVI), batch=2)
    assert found == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(OptionError, match="batch=0 is not supported"):
        perplexity(model, texts, 40, batch=0)


def test_divergence_is_from_the_predictions_of_the_plain_model() -> None:
    model = tiny_model("llama")
    texts = [prompt(1, 60, seed)[0] for seed in (1, 2)]
    assert quality(model, texts, 40).divergence == 0
    found = quality(compiled(model, KIVI), texts, 40, reference=model)
    assert found.perplexity == pytest.approx(
        perplexity(model, texts, 40, new_cache=lambda: oracle(model, KIVI)), rel=1e-5
    )
    wanted = _divergence(model, texts[0], 40)
    alone = quality(model, texts[:1], 40, new_cache=lambda: oracle(model, KIVI))
    assert alone.divergence == pytest.approx(wanted, rel=1e-3)
    assert alone.divergence > 1e-6


def test_a_compiled_model_is_no_reference_of_its_own() -> None:
    model = compiled(tiny_model("llama", layers=1), KIVI)
    with pytest.raises(OptionError, match=r"compiled, so that it cannot be its own reference"):
        kvpass.evaluate.quality(model, [prompt(1, 60)[0]], 40)


def _divergence(model: Any, ids: torch.Tensor, prompted: int) -> float:
    """By `torch.nn.functional.kl_div`, of the logits of all steps."""
    steps = [prompted] + [1] * (ids.numel() - prompted - 1)
    runs = (run_steps(model, ids[None], steps, cache=c) for c in (None, oracle(model, KIVI)))
    plain, packed = (x[0, prompted - 1 :].double().log_softmax(-1) for x, _ in runs)
    return float(kl_div(packed, plain, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("length", [0, 60, 61])
def test_perplexity_of_nothing_is_an_error(length: int) -> None:
    with pytest.raises(OptionError, match=f"prompt={length} is not supported for a text of 60"):
        perplexity(tiny_model("llama"), [prompt(1, 60)[0]], length)


def test_recall_counts_exact_greedy_answers() -> None:
    model = tiny_model("llama")
    document, question = prompt(1, 40)[0], prompt(1, 4, seed=7)[0]
    ids = torch.cat([document, question])[None]
    out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    right = out[0, ids.shape[1] :]
    wrong = torch.cat([right[:2], (right[2:] + 1) % 128])
    asked = RecallPrompt(document, ((question, right), (question, wrong), (question, right[:1])))
    assert recall_accuracy(model, [asked]) == pytest.approx(2 / 3)
    assert recall_accuracy(compiled(model, "fp"), [asked]) == pytest.approx(2 / 3)


def test_first_difference() -> None:
    a = torch.tensor([1, 2, 3])
    assert first_difference(a, a) is None
    assert first_difference(a, torch.tensor([1, 5, 3])) == 1
    assert first_difference(a, a[:2]) == 2


def test_cache_bytes_of_a_plain_and_of_a_packed_cache() -> None:
    model = tiny_model("llama")
    _, plain = run_steps(model, prompt(1, 300), [300])
    assert cache_bytes(plain) == (2 * 2 * 2 * 300 * 16 * 4, 32.0)
    _, packed = run_steps(compiled(model, KIVI), prompt(1, 300), [300])
    held, bits = cache_bytes(packed)
    assert held == sum(x.nbytes for layer in packed.layers for x in (layer.keys, layer.values))
    assert 4 < bits < 8
