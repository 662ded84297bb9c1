"""A ratio of the tokens stays exact: which they are, room for them, what a cache makes of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass import oracle_cache
from kvpass.errors import OptionError, PlanError
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP, RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops import logical
from kvpass.oracle import OracleLayer
from kvpass.plan import LayerPlan, Plan
from kvpass.tensor.packed import PackedKV
from tests.harness import compiled, graphs_compiled, run_steps
from tests.models import prompt, tiny_model
from tests.strategies import SEEDS, poisoned, randn, steps
from tests.tolerances import LOGITS_CODE_FLIP


@st.composite
def plans(draw):
    """Plans of 16 channels whose window is a ratio of the tokens."""
    codec = draw(st.sampled_from(["int2.channel8", "int4.token8"]))
    pack_every = draw(st.sampled_from([8, 32] if "channel" in codec else [1, 5]))
    rule = draw(st.sampled_from(["pivotal", "fraction"]))
    ratio = draw(st.integers(1, 999)) / 1000
    sinks = draw(st.sampled_from(["", "sinks=3,"]))
    window = draw(st.sampled_from([0, 0, 20]))
    return parse_plan(f"{codec}/{sinks}window={window},pack_every={pack_every},{rule}={ratio}")


def simulated(plan: TensorPlan, lengths: list[int]) -> list[int]:
    """How many tokens are packed when each step has ended, token by token: sinks, then the oldest
    exact ones, a pack_every at a time, while more than the ratio are exact."""
    rule = plan.retention
    ratio = Fraction(str(rule.pivotal or rule.fraction))
    sinks, packed, exact, ends = 0, 0, [], []

    def pack() -> None:
        nonlocal packed
        counted = len(exact) if rule.pivotal else len(exact) + packed
        least = max(int(ratio * counted), rule.window)
        while len(exact) - least >= rule.pack_every:
            del exact[: rule.pack_every]
            packed += rule.pack_every

    for i, n in enumerate(lengths):
        if i and n <= MAX_STEP:
            pack()
        for _ in range(n):
            if sinks < rule.sinks:
                sinks += 1
            else:
                exact.append(None)
        if not i or n > MAX_STEP:
            pack()
        ends.append(sinks + packed)
    return ends


# due(): after any steps the packed tokens are those of the rule; the ring holds the others, and
# another step, without a slot that a failed one must not overwrite.
@given(plans(), steps())
def test_what_is_packed_is_what_the_rule_says(plan, lengths):
    x = randn(1, 1, sum(lengths), 16)
    wanted, handle = simulated(plan, lengths), None
    for i, n in enumerate(lengths):
        start = sum(lengths[:i])
        new = x[:, :, start : start + n]
        handle = logical.append(handle, new, str(plan)) if i == 0 else torch.cat([handle, new], 2)
        *_, packed, total = handle.row_ends
        assert (packed, total) == (wanted[i], start + n)
        assert total - packed + MAX_STEP * (plan.retention.pivotal > 0) <= handle.window.shape[2]
        assert torch.equal(handle.decode()[:, :, packed:], x[:, :, packed : start + n])


# After a failed step of a pivotal ratio, which a retry would apply once more, all is as before.
@given(plans().filter(lambda plan: plan.retention.pivotal), steps(), st.integers(1, MAX_STEP))
def test_a_failed_step_leaves_no_trace(plan, lengths, new):
    x = randn(1, 1, sum(lengths), 16)
    handle = logical.append(None, x[:, :, : lengths[0]], str(plan))
    for i, n in enumerate(lengths[1:], 1):
        start = sum(lengths[:i])
        handle = torch.cat([handle, x[:, :, start : start + n]], 2)
    handle.reserve(new)
    before, ends = handle.decode(), handle.segment_ends.clone()
    saved = handle.snapshot(new)
    torch.ops.kvpass.append(handle.state, randn(1, 1, new, 16, seed=1), str(plan))
    handle.undo(saved)
    assert torch.equal(handle.segment_ends, ends)
    assert torch.equal(handle.decode(), before)


def test_the_pivotal_context_collapses_and_a_fraction_does_not():
    """As a prompt of 4,096 tokens at 10% does in the paper's rule; its room is given back."""
    exact = {}
    for rule in ("pivotal", "fraction"):
        plan = f"int2.channel32/window=0,pack_every=32,{rule}=0.1"
        handle = logical.append(None, torch.zeros(1, 1, 4096, 16), plan)
        exact[rule] = [4096 - handle.row_ends[0]]
        for _ in range(4):
            handle = torch.cat([handle, torch.zeros(1, 1, 1, 16)], 2)
            packed, total = handle.row_ends
            exact[rule].append(total - packed)
        held = handle.window.shape[2]
        assert held == (parse_plan(plan).ring if rule == "pivotal" else 409 + 63)
    assert exact == {"pivotal": [416, 65, 34, 35, 4], "fraction": [416, 417, 418, 419, 420]}


@given(
    plans(), SEEDS, st.lists(st.sampled_from([1, 1, 3, 16, 17, 40, "crop", "batch"]), max_size=8)
)
@settings(max_examples=60)
def test_a_cache_is_the_oracles(plan, seed, actions):
    """Prompts and steps, crops and joined batches, in poisoned memory."""
    x = randn(1, 2, 60 + 40 * len(actions), 16, seed=seed)
    oracle = OracleLayer(LayerPlan(plan, plan))
    oracle.update(x[:, :, :60], x[:, :, :60])
    with poisoned():
        handle = logical.append(None, x[:, :, :60], str(plan))
        for action in actions:
            total = handle.shape[2]
            if action == "crop":
                handle = handle[:, :, : total - 7]
                oracle.crop(-7)
            elif action == "batch":
                grown = handle.clone()
                grown.grow("window", handle.window.shape[2] + 9)
                handle = torch.cat([grown, handle])[1:]
            else:
                new = x[:, :, total : total + action]
                handle = torch.cat([handle, new], 2)
                oracle.update(new, new)
            assert type(handle) is PackedKV
            assert_close(handle.decode(), oracle.keys, rtol=0, atol=0)


def test_generation_equals_the_oracle_in_two_graphs() -> None:
    """While one ring shrinks and the other grows."""
    torch._dynamo.utils.counters.clear()
    parse = parse_plan
    keys = parse("int2.channel8/window=0,pack_every=8,pivotal=0.5")
    values = parse("int2.token8/window=3,pack_every=2,fraction=0.4")
    plan = Plan(LayerPlan(keys, values))
    model, ids, lengths = tiny_model("llama", layers=1), prompt(1, 170), [120] + [1] * 50
    twin = compiled(model, plan, strict=True)
    rings = []
    got, cache = run_steps(twin, ids[:, :120], [120])
    for t in range(120, 170):
        logits, cache = run_steps(twin, ids[:, t : t + 1], [1], cache=cache)
        got = torch.cat([got, logits], dim=1)
        held = cache.layers[0]
        rings.append((held.keys.window.shape[2], held.values.window.shape[2]))
    assert graphs_compiled() == 2
    assert rings[0][0] > rings[-1][0] == keys.ring
    assert rings[0][1] < rings[-1][1]
    wanted, _ = run_steps(model, ids, lengths, None, oracle_cache(plan, model.config))
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_bytes_are_counted():
    """The ring is part of what is held, exact tokens of what an element takes."""
    plan = parse_plan("int2.token16/window=0,pack_every=1,fraction=0.25")
    x = logical.append(None, torch.zeros(1, 2, 1000, 16), str(plan))
    assert x.window.shape[2] == plan.ring_slots(1000) == 250 + 1 + 2 * MAX_STEP - 1
    capacity = plan.capacity(750)
    assert x.nbytes == 2 * (capacity * (4 + 4) + x.window.shape[2] * 64) + 8
    assert x.bits_per_element == pytest.approx(0.75 * 4 + 0.25 * 32 + 8 * 8 / x.numel())


@given(plans())
def test_plans_parse_back(plan):
    assert parse_plan(str(plan)) == plan


def test_where_tokens_leave_there_is_no_ratio():
    plan = parse_plan("int2.token8/window=8,pack_every=1,fraction=0.1")
    assert str(plan.sliding(100)) == "int2.token8/window=8,pack_every=1/window_size=100"
    assert str(plan.static(64)) == "int2.token8/window=8,pack_every=1/window_size=63/room=64"
    with pytest.raises(PlanError, match="No ratio of the tokens can stay exact where only 100 "):
        TensorPlan(plan.codec, plan.retention, window_size=100)


@pytest.mark.parametrize(("fields", "message"), [
    ({"pivotal": 1.0}, "pivotal=1.0 is not supported; allowed: from 0.0 to 0.999"),
    ({"fraction": 0.12345}, "fraction=0.12345 is not supported; allowed: from 0.0 to 0.999"),
    ({"fraction": "0.1"}, "fraction='0.1' is not supported"),
    ({"pivotal": 0.1, "fraction": 0.2}, "pivotal=0.1 is not supported with fraction=0.2"),
])  # fmt: skip
def test_values(fields, message):
    with pytest.raises(OptionError, match=message):
        RetentionPolicy(**fields)
