"""Scores of candidates, and the choice among them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass import LayerPlan, Plan, Scores
from kvpass.calibration.allocation import allocate
from kvpass.calibration.scores import TensorScore
from kvpass.errors import OptionError, PlanError
from kvpass.format.parse import parse_plan
from tests.models import prompt, tiny_model

WINDOW = "/window=0,pack_every=1"
PLANS = tuple(
    Plan(LayerPlan(*[parse_plan(f"int{bits}.token32{WINDOW}")] * 2)) for bits in (2, 3, 4)
)
SUNK = parse_plan("int2.token32/sinks=3,window=0,pack_every=1")


def scores_of(costs: list[list[float]], by: str = "sensitivity", plans=PLANS) -> Scores:
    """Two heads of 32 channels in every tensor; layers of two tensors each."""
    names = [(f"layers.{i // 2}", ("keys", "values")[i % 2]) for i in range(len(costs))]
    bits = (3.0, 4.0, 5.0)
    made = {n: TensorScore(2, 32, tuple(c), bits) for n, c in zip(names, costs, strict=True)}
    return Scores(by, plans, made)


costs = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(st.lists(costs, min_size=4, max_size=4), st.floats(3, 5))
def test_is_the_best_of_all_choices(found, budget):
    """Cost at most that of any choice within the budget."""
    got = allocate(scores_of(found), budget_bits=budget)
    best = min(
        sum(c[i] for c, i in zip(found, choice, strict=True))
        for choice in itertools.product(range(3), repeat=4)
        if sum(3 + i for i in choice) / 4 <= budget + 1e-9
    )
    assert got.bits <= budget + 1e-6
    assert got.cost == pytest.approx(best, abs=1e-6)
    chosen = [PLANS[i] for i in got.chosen.values()]
    for layer in range(2):
        plan = got.plan.layers[f"layers.{layer}"]
        assert (plan.keys, plan.values) == tuple(p.default.keys for p in chosen[2 * layer :][:2])


def test_bytes_are_bits_of_all_tokens():
    falling = [[3.0, 2.0, 1.0]] * 4
    # Four tensors of 64 elements, 4 bits each, 100 tokens.
    got = allocate(scores_of(falling), max_bytes=4 * 64 * 4 * 100 / 8, tokens=100)
    assert got.bits == pytest.approx(4)


def test_the_fewest_bits_for_an_increase_of_perplexity():
    falling = [[0.02, 0.01, 0.0]] * 4
    got = allocate(scores_of(falling, "loss"), max_perplexity_increase=0.05)
    assert got.cost <= math.log(1.05)
    # ln 1.05 = 0.0488 allows four steps of 0.01.
    assert got.bits == pytest.approx(4)


def test_keys_and_values_have_the_same_sinks():
    plans = (PLANS[0], Plan(LayerPlan(SUNK, SUNK)), PLANS[2])
    cheap = [[1.0, 0.0, 5.0], [0.0, 1.0, 5.0]]
    got = allocate(scores_of(cheap, plans=plans), budget_bits=5.0)
    plan = got.plan.layers["layers.0"]
    assert plan.keys.sinks == plan.values.sinks


@pytest.mark.parametrize(("limits", "match"), [
    ({}, "needs one of budget_bits, max_bytes and max_perplexity_increase"),
    ({"budget_bits": 3, "max_bytes": 5}, "needs one of"),
    ({"budget_bits": -1}, "budget_bits=-1 is not supported"),
    ({"budget_bits": 2.5}, "budget_bits=2.5 cannot be kept: the candidates come to 1.2 times"),
    ({"max_bytes": 100}, "tokens=None is not supported"),
    ({"max_perplexity_increase": 0.01}, "needs scores by 'loss', not 'sensitivity'"),
])  # fmt: skip
def test_limits_that_are_not_allowed(limits, match):
    with pytest.raises(OptionError, match=match):
        allocate(scores_of([[1.0, 0.5, 0.2]] * 2), **limits)


@pytest.mark.parametrize("by", ["importance", "sensitivity", "loss"])
def test_scores_of_a_model(by):
    model = tiny_model("llama")
    texts = [prompt(1, 40, seed=i)[0] for i in range(2)]
    kivi = [kvpass.recipe(f"kivi-{b}bit", group=8, residual=8) for b in (2, 4)]
    plans = [r.plan(model.config) for r in (*kivi, kvpass.recipe("fp"))]
    found = kvpass.score(model, plans, texts, by=by, progress=False)
    assert len(found.tensors) == 4
    for tensor in found.tensors.values():
        two, four, none = tensor.costs
        assert none == 0
        assert tensor.bits == (6.0, 8.0, 16.0)
        if by != "loss":
            assert two > four > 0
    if by == "sensitivity":
        known = kvpass.sensitivities(model, plans[0], texts, progress=False)
        for (layer, kind), tensor in found.tensors.items():
            assert tensor.costs[0] == pytest.approx(getattr(known[layer], kind))
    total = sum(sum(t.costs[:2]) for t in found.tensors.values())
    assert total != 0


def test_one_scoring_for_all_budgets():
    """Recipes are calibrated, what `auto` tries are its candidates, and plans know their model."""
    model = tiny_model("llama", head_dim=32, layers=2)
    texts = [prompt(1, 60, seed=i)[0] for i in range(2)]
    auto = kvpass.recipe("auto", window=32, sinks=2)
    scores = kvpass.score(model, auto, texts, progress=False)
    assert [plan.recipe for plan in scores.candidates] == [r.name for r in auto.candidates(32)]
    assert all(plan.calibration.tokens == 120 for plan in scores.candidates)
    curve = kvpass.cost_curve(scores, (2.5, 3, 4))
    assert all(found.bits <= budget for found, budget in zip(curve, (2.5, 3, 4), strict=True))
    falling = [found.cost for found in curve]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 3
    alone = kvpass.calibrate(model, auto, texts, progress=False, budget=3)
    assert alone == replace(curve[1].plan, recipe="auto")
    behind_rope = replace(auto, before_rope=False).candidates(32)
    assert behind_rope == [r for r in auto.candidates(32) if not r.name.startswith("kvquant")]
    own = [auto.candidates(32)[0], curve[0].plan]
    found = kvpass.score(model, own, texts, progress=False)
    assert found.candidates == (scores.candidates[0], curve[0].plan)


def test_arguments_of_score():
    model = tiny_model("llama")
    texts = [prompt(1, 40)[0]]
    with pytest.raises(OptionError, match="Unknown score 'size'"):
        kvpass.score(model, [kvpass.recipe("fp").plan(model.config)], texts, by="size")
    for none in ([], ["kivi-2bit"]):
        with pytest.raises(
            OptionError, match=r"allowed: kvpass\.recipe\('auto'\), or at least one"
        ):
            kvpass.score(model, none, texts)
    with pytest.raises(OptionError, match="scores of type dict are not supported"):
        allocate({}, budget_bits=3)
    tensor = parse_plan("int2.token24/window=0,pack_every=1")
    with pytest.raises(PlanError, match=r"cannot be stored as int2\.token24"):
        kvpass.score(model, [Plan(LayerPlan(tensor, tensor))], texts, progress=False)
