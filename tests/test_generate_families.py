"""Beam search and assisted decoding, which reorder and crop caches, in ten families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvpass import PackedKV, recipe
from kvpass.zoo.families import tiny_model
from kvpass.zoo.run import TOLERANCE
from tests.harness import compiled, oracle, run_steps
from tests.models import prompt

KIVI = recipe("kivi-4bit", group=16, residual=16)
GREEDY: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
SDPA = ("llama",)
WRITTEN_OUT = ("gpt_oss", "bloom")
# Recurrent layers cannot be cropped: transformers refuses to assist them.
RECURRENT = ("qwen3_5_text",)


def model_of(family: str) -> Any:
    model = tiny_model(family, "eager" if family in WRITTEN_OUT else "sdpa")
    model.generation_config.eos_token_id = None
    return model


def draft_of(model: Any) -> Any:
    """A model that mostly agrees with ``model``."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in draft.parameters():
            if p.dim() > 1:
                p.add_(torch.randn(p.shape, generator=generator) * 0.02 * p.std())
    return draft


@pytest.mark.parametrize("family", [*SDPA, *WRITTEN_OUT, *RECURRENT])
def test_beams(family: str) -> None:
    model, ids = model_of(family), prompt(1, 60)
    twin = compiled(model, KIVI)
    wanted = model.generate(ids, past_key_values=oracle(model, KIVI), num_beams=3, **GREEDY)
    for kind in (None, "static"):
        options = {**GREEDY, "num_beams": 3, "return_dict_in_generate": True}
        out = twin.generate(ids, cache_implementation=kind, **options)
        assert torch.equal(out.sequences, wanted), kind
        layers = [x for x in out.past_key_values.layers if getattr(x, "keys", None) is not None]
        assert layers
        assert all(isinstance(layer.keys, PackedKV) for layer in layers)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bloom"])
def test_a_draft_model_assists(family: str) -> None:
    model, ids = model_of(family), prompt(1, 60)
    options = {**GREEDY, "assistant_model": draft_of(model)}
    wanted = model.generate(ids, past_key_values=oracle(model, KIVI), **options)
    assert torch.equal(compiled(model, KIVI).generate(ids, **options), wanted)


@pytest.mark.parametrize("kind", ["dynamic", "sliding"])
def test_a_batch_is_repeated_and_split_between_steps(kind: str) -> None:
    model = model_of("llama" if kind == "dynamic" else "mistral")
    ids = prompt(2, 60)
    logits = []
    for runner, cache in ((model, oracle(model, KIVI)), (compiled(model, KIVI), None)):
        _, cache = run_steps(runner, ids[:, :50], [45, *[1] * 5], None, cache)
        cache.batch_repeat_interleave(2)
        repeated, cache = run_steps(
            runner, ids[:, 50:55].repeat_interleave(2, 0), [1] * 5, None, cache
        )
        cache.batch_select_indices(torch.tensor([3, 0]))
        selected, cache = run_steps(runner, ids[[1, 0], 55:], [1] * 5, None, cache)
        logits.append(torch.cat([repeated.flatten(), selected.flatten()]))
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (logits[0] - logits[1]).abs().max() <= TOLERANCE * logits[0].abs().max()
