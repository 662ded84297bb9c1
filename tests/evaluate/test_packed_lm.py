"""A model for lm-evaluation-harness: what it scores without packing is what HFLM scores."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvpass.evaluate import packed_lm
from kvpass.evaluate.packed_lm import PackedLM
from kvpass.evaluate.quality import read
from tests.evaluate.test_tasks import tokenizer
from tests.harness import compiled
from tests.models import tiny_model

REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


@cache
def model() -> Any:
    return tiny_model("llama", layers=1, vocab_size=2048, max_position_embeddings=256)


def text(words: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(str(rng.randrange(1000)) for _ in range(words))


def instances(kind: str) -> list[Instance]:
    """Contexts of several lengths, two of one, one too long, and an empty one."""
    lengths = (30, 30, 21, 150)
    contexts = [text(n, seed) for seed, n in enumerate(lengths)]
    if kind == "loglikelihood":
        found: list[Any] = [(c, more) for c in contexts for more in (" 1", " 12 34 5", "x")]
        found.append(("", "12 ab"))
    elif kind == "loglikelihood_rolling":
        found = [(context,) for context in contexts]
    else:
        found = [(c, {"until": ["9"], "max_gen_toks": 8}) for c in contexts[1:3]]
    return [Instance(kind, {}, arguments, number) for number, arguments in enumerate(found)]


class Plain(HFLM):
    """HFLM with the tokens that the tokenizer does not name."""

    eot_token_id = 1


@cache
def expected() -> dict[str, Any]:
    own = PackedLM(model(), tokenizer("small")).tokenizer
    plain = Plain(pretrained=model(), tokenizer=own, batch_size=2)
    return {kind: getattr(plain, kind)(instances(kind), disable_tqdm=True) for kind in REQUESTS}


def found(subject: Any, batch: int) -> tuple[dict[str, Any], PackedLM]:
    torch.compiler.reset()
    lm = PackedLM(subject, tokenizer("small"), batch=batch, prompt=24)
    return {kind: getattr(lm, kind)(instances(kind), disable_tqdm=True) for kind in REQUESTS}, lm


@pytest.mark.parametrize(("recipe", "batch"), [(None, 1), (None, 3), ("fp", 3)])
def test_without_packing_results_are_those_of_hflm(recipe: str | None, batch: int) -> None:
    own, lm = found(model() if recipe is None else compiled(model(), recipe), batch)
    wanted = expected()
    scores, rolling = own["loglikelihood"], own["loglikelihood_rolling"]
    assert [score for score, _ in scores] == pytest.approx(
        [score for score, _ in wanted["loglikelihood"]], rel=1e-4
    )
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in wanted["loglikelihood"]]
    assert rolling == pytest.approx(wanted["loglikelihood_rolling"], rel=1e-4)
    assert own["generate_until"] == wanted["generate_until"]
    assert lm.size["cached"] == 256
    # Three continuations of the longest context.
    assert lm.shortened == 3


def test_packing_shows_in_all_kinds_of_requests() -> None:
    """However few graphs Dynamo may compile otherwise: beyond those it would pack nothing."""
    torch.compiler.reset()
    subject = compiled(model(), "kivi-2bit", residual=32)
    lm = PackedLM(subject, tokenizer("small"), batch=3, prompt=24)
    parts = dict(zip(REQUESTS, (slice(3), slice(3, 4), slice(2)), strict=True))
    own, exact = {}, {kind: expected()[kind][part] for kind, part in parts.items()}
    with torch._dynamo.config.patch(recompile_limit=1):
        for kind, part in parts.items():
            own[kind] = getattr(lm, kind)(instances(kind)[part], disable_tqdm=True)
    pairs = zip(own["loglikelihood"], exact["loglikelihood"], strict=True)
    # Also of single tokens.
    assert min(abs(a - b) for (a, _), (b, _) in pairs) > 1e-3
    assert abs(own["loglikelihood_rolling"][0] - exact["loglikelihood_rolling"][0]) > 0.1
    assert own["generate_until"] != exact["generate_until"]
    assert lm.size["bits"] < 32


def test_greedy_continuations_are_found() -> None:
    lm = PackedLM(model(), tokenizer("small"), batch=2)
    context = text(30, 0)
    ids = torch.tensor([lm.tok_encode(context)])
    said = model().generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    pairs = [(None, ids[0].tolist(), said), (None, ids[0].tolist(), [*said[:2], said[2] + 1])]
    keyed = [(("a", "b"), *pair[1:]) for pair in pairs]
    assert [g for _, g in lm._loglikelihood_tokens(keyed, disable_tqdm=True)] == [True, False]


def test_a_context_is_read_once_for_all_its_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = PackedLM(model(), tokenizer("small"), batch=2)
    shapes = []

    def spied(subject: Any, ids: torch.Tensor, *more: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return read(subject, ids, *more)

    monkeypatch.setattr(packed_lm, "read", spied)
    context = text(30, 0)
    more = [Instance("loglikelihood", {}, (context, f" {n}"), n) for n in range(5)]
    lm.loglikelihood(more, disable_tqdm=True)
    assert shapes == [(1, len(lm.tok_encode(context)) - 1)]
