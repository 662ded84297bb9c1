"""Filters: the tokens that they like best stay exact, whatever comes later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import PackedKV, RetentionPolicy, register_filter
from kvpass.errors import OptionError, PlanError
from kvpass.format.filters import FILTERS
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import fake_quantize
from kvpass.ops.append import append
from kvpass.ops.pack import pack
from tests.strategies import SEEDS, poisoned, randn, steps

CODEC = "int2.token8"


@pytest.fixture
def largest_first():
    """A filter of a user's own."""
    register_filter("first_channel")(lambda tokens: tokens[..., 0].float())
    yield "first_channel"
    del FILTERS["first_channel"]


def run(plan, parts):
    """The handle after a prompt and steps, in memory that is poisoned until it is written."""
    p = parse_plan(plan)
    with poisoned():
        packed = PackedKV.of_prompt(pack(parts[0], plan), p, parts[0].shape[2], torch.float32)
        for part in parts[1:]:
            packed.reserve(part.shape[2])
            append(packed.state, part, plan)
            packed = packed.extended(part.shape[2])
    return packed


@settings(max_examples=40, deadline=None)
@given(
    lengths=steps(), seed=SEEDS, sinks=st.sampled_from([0, 3]), kept=st.sampled_from([1, 4, 30]),
    name=st.sampled_from(["heavy_hitters", "outliers"]),
)  # fmt: skip
def test_the_best_tokens_stay_exact_and_the_others_are_rounded(lengths, seed, sinks, kept, name):
    text = f"{CODEC}/sinks={sinks},window=5,pack_every=2,retained={kept},filter={name}"
    text = text.replace("sinks=0,", "")
    x = randn(2, 2, sum(lengths), 8, seed=seed)
    got = run(text, list(x.split(lengths, dim=2)))
    packed = int(got.segment_ends[0, -2]) if got.shape[2] > sinks else 0
    rounded = fake_quantize(parse_plan(text).codec, x)
    inside = torch.arange(x.shape[2])
    inside = (inside >= sinks) & (inside < packed)
    scores = FILTERS[name](x).masked_fill(~inside, -torch.inf)
    count = min(kept, int(inside.sum()))
    best = scores.topk(count, dim=2).indices
    exact = (~inside).expand(2, 2, -1).clone().scatter_(2, best, True)
    assert torch.equal(got.decode(), torch.where(exact.unsqueeze(3), x, rounded))
    elements = x.numel()
    assert got.bits_per_element >= 32 * exact.sum().item() / elements * 8


def test_a_filter_of_ones_own(largest_first):
    plan = f"{CODEC}/window=0,pack_every=1,retained=2,filter={largest_first}"
    x = randn(1, 1, 30, 8)
    x[0, 0, 11, 0], x[0, 0, 29, 0], x[0, 0, 3, 0] = 50, 60, 70
    got = run(plan, [x])
    assert sorted(got.positions.flatten().tolist()) == [3, 29]
    assert torch.equal(got.decode()[0, 0, [3, 29]], x[0, 0, [3, 29]])


def test_crops_rows_clones_and_zeros_keep_what_they_should():
    plan = f"{CODEC}/window=4,pack_every=1,retained=6,filter=outliers"
    x = randn(3, 2, 40, 8)
    got = run(plan, [x])
    whole = got.decode()
    for n in (38, 30, 9, 1):
        cropped = got[:, :, :n]
        assert torch.equal(cropped.decode(), whole[:, :, :n])
        assert (cropped.positions < max(n, 1)).all()
    rows = torch.tensor([2, 0, 0])
    assert torch.equal(got.index_select(0, rows).decode(), whole[rows])
    assert torch.equal(got.clone().decode(), whole)
    assert torch.equal(got.double().decode(), whole.double())
    assert got.clone().zero_().decode().abs().max() == 0


def test_what_is_refused():
    with pytest.raises(OptionError, match=r"Unknown filter 'heavy_hiters'. Did you mean 'heavy_"):
        RetentionPolicy(filter="heavy_hiters", retained=3)
    with pytest.raises(OptionError, match="filter='outliers' is not supported with retained=0"):
        RetentionPolicy(filter="outliers")
    with pytest.raises(OptionError, match="filter=None is not supported with retained=3"):
        RetentionPolicy(retained=3)
    with pytest.raises(OptionError, match="A filter named 'outliers' is registered already"):
        register_filter("outliers")
    with pytest.raises(OptionError, match="Filter name 'a b' is not supported"):
        register_filter("a b")
    with pytest.raises(PlanError, match="retained=3 cannot stay where only 9 tokens do"):
        parse_plan(f"{CODEC}/window=4,pack_every=1,retained=3,filter=outliers/window_size=9")


def test_scores_of_another_shape_are_one_sentence():
    register_filter("whole")(lambda tokens: tokens.sum())
    try:
        with pytest.raises(OptionError, match=r"Filter 'whole' returned scores \[\] for tokens"):
            run(f"{CODEC}/window=0,pack_every=1,retained=2,filter=whole", [randn(1, 1, 4, 8)])
    finally:
        del FILTERS["whole"]


def test_windows_and_static_caches_have_no_filter():
    plan = parse_plan(f"{CODEC}/sinks=2,window=4,pack_every=1,retained=3,filter=outliers")
    assert str(plan.sliding(50)) == f"{CODEC}/window=4,pack_every=1/window_size=50"
    assert str(plan.static(50)) == f"{CODEC}/window=4,pack_every=1/window_size=49/room=50"
