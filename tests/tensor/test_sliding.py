"""A sliding window: a ring of packed tokens against a cache that drops none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.errors import PlanError
from kvpass.format.parse import parse_plan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops import logical
from kvpass.oracle import OracleSlidingLayer
from kvpass.plan import LayerPlan
from kvpass.tensor.dispatch import DECODES
from kvpass.tensor.packed import PackedKV
from tests.strategies import poisoned, randn, steps, tensor_plans

KEYS = "int2.channel8/window=0,pack_every=16"
VALUES = "int4.token8/window=8,pack_every=1"


def oracle(plan: TensorPlan, keep: int) -> OracleSlidingLayer:
    return OracleSlidingLayer(LayerPlan(plan, plan), keep + 1)


def history(layer: OracleSlidingLayer, tokens: int) -> torch.Tensor:
    return layer.keys[:, :, layer.keys.shape[2] - tokens :]


def extend(x: PackedKV, new: torch.Tensor) -> PackedKV:
    """A step that drops nothing, as `torch.cat` outside compiled code."""
    return torch.cat([x, new], dim=2)


@settings(deadline=None, max_examples=60)
@given(
    plan=tensor_plans(16),
    keep=st.integers(1, 90),
    lengths=steps(most=25),
    slides=st.lists(st.booleans(), min_size=26, max_size=26),
)
def test_a_ring_holds_what_a_cache_that_drops_nothing_shows(plan, keep, lengths, slides):
    layer, packed = oracle(plan, keep), None
    planned = plan.sliding(keep)
    for i, (n, slide) in enumerate(zip(lengths, slides, strict=False)):
        new = randn(2, 2, n, 16, seed=i)
        layer.update(new, new)
        with poisoned():
            if packed is None:
                packed = logical.append(None, new, str(planned), not slide)
            else:
                packed = extend(packed, new)
            if slide:
                packed = packed[:, :, -keep:]
        assert isinstance(packed, PackedKV)
        assert_close(packed.decode(), history(layer, packed.shape[2]), rtol=0, atol=0)
    if all(slides[: len(lengths)]):
        assert packed.shape[2] == min(keep, sum(lengths))


@pytest.mark.parametrize("text", [KEYS, VALUES, "fp"])
@pytest.mark.parametrize("taken_back", [0, 1, 7])
def test_tokens_are_taken_back(text, taken_back):
    """As in assisted decoding: a step keeps all tokens until some of them are taken back."""
    keep, plan = 40, parse_plan(text)
    layer = oracle(plan, keep)
    packed = None
    for i, n in enumerate([70, *[9] * 30]):
        new = randn(1, 2, n, 16, seed=i)
        layer.update(new, new)
        if packed is None:
            packed = logical.append(None, new, str(plan.sliding(keep)), True)
        else:
            packed = extend(packed, new)
        end = packed.shape[2] - taken_back
        packed = packed[:, :, max(0, end - keep) : end]
        if taken_back:
            layer.crop(-taken_back)
        assert packed.shape[2] == keep
        assert packed.capacity <= packed.plan.capacity(128)
        assert_close(packed.decode(), history(layer, keep), rtol=0, atol=0)


def test_a_part_that_no_step_could_go_on_from_is_decoded():
    keep = 40
    packed = logical.append(None, randn(1, 2, 60, 16), f"{KEYS}/window_size={keep}")
    DECODES.clear()
    with pytest.warns(UserWarning, match="decoded a packed cache tensor"):
        part = packed[:, :, 3:]
    assert type(part) is torch.Tensor
    assert_close(part, packed.decode()[:, :, 3:], rtol=0, atol=0)


def test_a_ring_does_not_grow():
    packed = logical.append(None, randn(1, 2, 1000, 16), f"{KEYS}/window_size=300")
    capacity = packed.capacity
    assert capacity == 512
    for i in range(200):
        packed = extend(packed, randn(1, 2, 7, 16, seed=i))[:, :, -300:]
    assert packed.capacity == capacity
    assert packed.shape[2] == 300


def test_rows_are_joined_and_selected():
    packed = logical.append(None, randn(3, 2, 90, 16), f"{VALUES}/window_size=50")
    plain = packed.decode()
    assert_close(
        packed.index_select(0, torch.tensor([2, 0])).decode(), plain[[2, 0]], rtol=0, atol=0
    )
    assert_close(
        packed.repeat_interleave(2, 0).decode(), plain.repeat_interleave(2, 0), rtol=0, atol=0
    )
    joined = torch.cat([packed, packed[:1]])
    assert type(joined) is PackedKV
    assert_close(joined.decode(), torch.cat([plain, plain[:1]]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "text",
    [
        "fp/window_size=15",
        f"{KEYS}/window_size=15",
        "fp/window_size=63/room=64",
        f"{VALUES}/window_size=63/room=64",
    ],
)
def test_plans_print_and_parse(text):
    assert str(parse_plan(text)) == text


def test_short_windows_are_not_packed():
    plan = parse_plan(VALUES)
    assert plan.sliding(9) == TensorPlan(window_size=9)
    assert plan.sliding(10) == replace(plan, window_size=10)


def test_sizes_must_fit():
    with pytest.raises(
        PlanError, match="window_size=0 is not supported; allowed: a positive number"
    ):
        TensorPlan(window_size=0)
    with pytest.raises(PlanError, match="room=64 needs window_size=63, not None"):
        TensorPlan(room=64)
