"""`RetentionPolicy` and `TensorPlan`: what is due, room for it, names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpass.errors import OptionError, PlanError
from kvpass.format.codec import FP, Codec
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP, RetentionPolicy
from kvpass.format.tensor_plan import TILE, Segment, TensorPlan
from tests.strategies import steps, tensor_plans

PLANS = st.sampled_from([16, 64, 80, 128]).flatmap(tensor_plans)
RESIDENCIES = st.builds(RetentionPolicy, st.integers(0, 200), st.integers(1, 200))


@given(RESIDENCIES, st.integers(0, 1000))
def test_due_is_whole_flushes_beyond_the_window(retention, exact):
    due = retention.due(exact)
    assert due % retention.pack_every == 0
    assert 0 <= due <= exact
    left = exact - due
    assert left < retention.window + retention.pack_every
    assert due == 0 or left >= retention.window


@pytest.mark.parametrize(
    ("window", "pack_every", "exact", "due"),
    # KIVI: keys 128 at a time, values one by one beyond 128.
    [(0, 128, 127, 0), (0, 128, 128, 128), (0, 128, 300, 256), (128, 1, 128, 0), (128, 1, 131, 3)],
)
def test_due_of_kivi(window, pack_every, exact, due):
    assert RetentionPolicy(window, pack_every).due(exact) == due


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 950), st.integers(0, 5))
def test_a_pivotal_ratio_is_a_window_where_tokens_come_one_by_one(window, every, ratio, sinks):
    policy = RetentionPolicy(window, every, sinks, pivotal=ratio / 1000)
    same, exact, packed = policy.of_single_steps(), 0, 0
    assert not same.grows
    for tokens in range(1000):
        exact += tokens >= sinks
        due = policy.due(exact, packed)
        exact, packed = exact - due, packed + due
        assert same.packed_before(tokens + 1) == (sinks + packed if packed else 0)


@pytest.mark.parametrize(
    ("rule", "exact"), [("pivotal", [416, 65, 34, 35]), ("fraction", [416, 417, 418, 419])]
)
def test_a_ratio_of_a_prompt_shrinks_or_stays(rule, exact):
    """Exact tokens of a prompt of 4,096, then of one token more at a time."""
    plan = parse_plan(f"int2.channel32/window=0,pack_every=32,{rule}=0.1")
    packed = plan.packed(4096)
    found = [4096 - packed]
    for total in range(4096, 4099):
        packed += plan.retention.due(total - packed, packed)
        found.append(total + 1 - packed)
    assert found == exact


@given(PLANS, st.integers(0, 2000))
def test_capacity_is_whole_tiles_at_least_two(plan, tokens):
    capacity = plan.capacity(tokens)
    assert plan.tile % TILE == 0
    assert plan.tile % plan.codec.token_group == 0
    assert capacity % plan.tile == 0
    assert capacity >= max(tokens, 2 * plan.tile)
    assert capacity == 2 * plan.tile or capacity - tokens < plan.tile


def test_tile_of_a_group_that_does_not_divide_128():
    assert TensorPlan(Codec(2, "channel", 24), RetentionPolicy(0, 48)).tile == 384


@given(PLANS, steps())
def test_ring_holds_the_exact_tokens_and_spares_a_step(plan, lengths):
    if plan.codec.identity:
        assert plan.ring == 0
        return
    # Sinks, once they are filled, are no longer in anybody's way.
    total = max(0, lengths[0] - plan.sinks)
    packed = plan.packed(lengths[0])
    assert total - packed <= plan.ring
    for n in lengths[1:]:
        live = total - packed
        counted = total if n <= MAX_STEP else total + n
        packed += plan.retention.due(counted - packed)
        total += n
        assert total - packed <= plan.ring
        if n <= MAX_STEP:
            # What a failed step must not overwrite: the tokens that were live when it began.
            left = total - n - packed
            assert left <= live
            assert left + n <= plan.ring


@given(PLANS)
def test_segments_and_state_names(plan):
    ring, exact = Segment(FP, plan.ring), ("codes", "qparams", "window")
    if plan.codec.identity:
        assert plan.segments == (Segment(FP, None),)
        assert plan.layout.names == ("codes", "segment_ends")
        assert plan.packed(37) == 37
        return
    extras = ("token_scales",) * plan.codec.scale_by_token
    if plan.sinks:
        assert plan.segments == (Segment(FP, plan.sinks), Segment(plan.codec), ring)
        assert plan.layout.names == (*exact, "sinks", *extras, "segment_ends")
    else:
        assert plan.segments == (Segment(plan.codec, None), ring)
        assert plan.layout.names == (*exact, *extras, "segment_ends")
    exact = plan.retention.window + plan.retention.pack_every + MAX_STEP - 1
    assert exact <= plan.ring < exact + 16
    assert plan.ring % 16 == 0
    assert plan.packed(37) == plan.retention.due(37 - plan.sinks)


@given(PLANS)
def test_plan_parses_back(plan):
    assert parse_plan(str(plan)) == plan


def test_sinks_are_printed_where_there_are_any():
    codec = Codec(2, "channel", 32)
    plain = TensorPlan(codec, RetentionPolicy(128, 32))
    assert str(plain) == "int2.channel32/window=128,pack_every=32"
    assert str(TensorPlan(codec, RetentionPolicy(128, 32, 5))) == (
        "int2.channel32/sinks=5,window=128,pack_every=32"
    )
    assert parse_plan("int2.channel32/sinks=0,window=128,pack_every=32") == plain


def test_a_window_that_slides_has_no_sinks():
    plan = parse_plan("int2.token8/sinks=5,window=8,pack_every=1")
    assert str(plan.sliding(100)) == "int2.token8/window=8,pack_every=1/window_size=100"
    assert str(plan.static(64)) == "int2.token8/window=8,pack_every=1/window_size=63/room=64"
    with pytest.raises(PlanError) as caught:
        replace(plan, window_size=100)
    assert str(caught.value) == "sinks=5 and retained=0 cannot stay where only 100 tokens do."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp/sinks=5,window=0,pack_every=1",
        "int2.channel32/sinks=5",
        "int2.channel32/window=0,pack_every=32,sinks=5",
        "fp/window=0,pack_every=1",
        "int2.channel32",
        "int2.channel32/window=0",
        "int2.channel32/window=-1,pack_every=32",
        "int2.channel32/pack_every=32,window=0",
    ],
)
def test_unreadable_plan(text):
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert str(caught.value) == (
        f"Tensor plan {text!r} cannot be read; allowed: 'fp' or e.g. "
        "'int2.channel32/window=0,pack_every=128', 'int2.channel32|int4.channel32|fp/chunk=32'."
    )


def test_group_divides_flush():
    with pytest.raises(PlanError) as caught:
        TensorPlan(Codec(2, "channel", 32), RetentionPolicy(0, 100))
    assert str(caught.value) == (
        "group 32 of int2.channel32 does not divide the residual of 100 tokens "
        "that are packed at a time."
    )
    assert TensorPlan(Codec(2, "token", 32), RetentionPolicy(0, 100)).retention.pack_every == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window=-1 is not supported; allowed: a whole number, at least 0."),
        ({"window": 1.5}, "window=1.5 is not supported; allowed: a whole number, at least 0."),
        ({"pack_every": 0}, "pack_every=0 is not supported; allowed: a whole number, at least 1."),
        ({"sinks": -1}, "sinks=-1 is not supported; allowed: a whole number, at least 0."),
        (
            {"pack_every": "1"},
            "pack_every='1' is not supported; allowed: a whole number, at least 1.",
        ),
    ],
)
def test_residency_values(arguments, message):
    with pytest.raises(OptionError) as caught:
        RetentionPolicy(**arguments)
    assert str(caught.value) == message
