"""The kernels in Triton's interpreter, for calibrated formats and keys before RoPE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpass.format.parse import parse_plan
from kvpass.format.quantize import split_outliers, static_qparams
from kvpass.format.state import State
from kvpass.tensor.packed import PackedKV
from lowering.triton import append, pack, unpack
from lowering.triton.attention import attend, attention, unsupported_reason
from lowering.triton.heuristics import attention_candidates, attention_sizes
from lowering.triton.layouts import layout_of
from tests.calibrated import ENCODED, PLANS, nuq, same_state, states_of
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import dense_attention, keys_like, relative_error
from tests.triton_templates.test_attention_kernel import query

pytestmark = pytest.mark.interpreter

ops = torch.ops.kvpass
DECLINED = {"fp": "exact keys before", "sliding": "window slides"}
TAKEN = {name: plans for name, plans in PLANS.items() if name not in DECLINED}
# Decoded in fp32; sums of products are rounded in another order.
FP32_TOLERANCE = 1e-6


def check(plans, keys, values, q, mask=None, **variant):
    arguments = (q, keys, values, mask, 0.125, *plans)
    assert unsupported_reason(*arguments, **variant) is None
    error = relative_error(attention(*arguments, **variant), dense_attention(*arguments, **variant))
    limit = FP32_TOLERANCE if q.dtype == torch.float32 else TRITON_ATTENTION[q.dtype]
    assert error <= limit, error


@pytest.mark.parametrize("name", TAKEN)
def test_attention(name):
    """Ragged tiles of half precision, and of single precision with one token and with many."""
    for dtype, tokens in ((torch.float16, 90), (torch.float32, 1), (torch.float32, 145)):
        keys, values = states_of(TAKEN[name], tokens, dtype, 2)
        check(TAKEN[name], keys, values, query(2, 4, 1, 64, dtype))


@pytest.mark.parametrize(
    ("bits", "dim", "rope"), [(2, 80, "halves0-80"), (3, 96, "neighbours0-96")]
)
def test_lanes_that_hold_no_channel(bits, dim, rope):
    plans = (
        nuq(bits, "channel0", 4, rest=f"/rope={rope}"),
        nuq(bits, f"token{2 * dim}", 4),
    )
    keys, values = states_of(plans, 50, torch.float32, 2, dim)
    check(plans, keys, values, query(2, 4, 1, dim, torch.float32))
    for plan, state in ((plans[0], keys), (plans[1], values)):
        got, expected = (op(state, 50, plan, torch.float32) for op in (unpack.unpack, ops.unpack))
        assert relative_error(got, expected) <= FP32_TOLERANCE


def test_attention_in_bf16_with_rows_of_all_sequences():
    keys, values = states_of(TAKEN["nuq3-1%"], 90, torch.bfloat16, 1)
    assert State.of(keys, TAKEN["nuq3-1%"][0]).cos_sin.shape[0] == 1
    check(TAKEN["nuq3-1%"], keys, values, query(2, 4, 1, 64, torch.bfloat16))


@pytest.mark.parametrize(
    "variant", [{"causal": True}, {"causal": True, "window": 37}, {"mask": True}]
)
def test_several_queries_with_bounds_and_masks(variant):
    plans = TAKEN["nuq4"]
    keys, values = states_of(plans, 110, torch.float16, 2)
    mask = None
    if variant.pop("mask", False):
        mask = torch.rand(2, 1, 5, 110, generator=torch.Generator().manual_seed(0)) > 0.3
    check(plans, keys, values, query(2, 4, 5, 64), mask, **variant)


def test_more_outliers_of_a_token_in_one_head_than_are_unrolled():
    plans = (nuq(3, "channel0", 12, rest="/rope=halves0-64"), nuq(3, "token128", 12))
    keys, values = states_of(plans, 40, torch.float16, 1)
    for state, plan in ((keys, plans[0]), (values, plans[1])):
        places, _ = split_outliers(State.of(state, plan).outliers)
        assert int(((places[:, :20] < 64).sum(2)).max()) > 4
    check(plans, keys, values, query(2, 4, 1, 64))


def test_other_sizes_give_the_same():
    plans = TAKEN["kivi"]
    keys, values = states_of(plans, 90, torch.float16, 1)
    k, v = (layout_of(plan, 64) for plan in plans)
    q = query(2, 4, 1, 64)
    table = attention_sizes(k, v, 2, 4, keys[0].shape[2], q)
    expected = dense_attention(q, keys, values, None, 0.125, *plans)
    for sizes in attention_candidates(table, k, v):
        got = attend(sizes, q, keys, values, None, 0.125, *plans)
        assert relative_error(got, expected) <= TRITON_ATTENTION[torch.float16], sizes


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined(name):
    keys, values = states_of(PLANS[name], 40, torch.float16, 1)
    q = query(2, 4, 1, 64)
    assert DECLINED[name] in unsupported_reason(q, keys, values, None, 0.125, *PLANS[name])


def test_pairs_that_do_not_lie_in_the_same_lanes_are_declined():
    plans = (nuq(2, "channel0", rest="/rope=halves0-24"), nuq(2, "token128"))
    keys, values = states_of(plans, 40, torch.float16, 1)
    reason = unsupported_reason(query(2, 4, 1, 64), keys, values, None, 0.125, *plans)
    assert "0 ... 24 that a rotary embedding rotates do not lie in the same lanes of 8" in reason


@pytest.mark.parametrize("plan", ENCODED, ids=lambda text: text.replace("/", " "))
def test_encoding_is_the_references(plan):
    """Of a prompt, and of steps of one and of several tokens."""
    p = parse_plan(plan)
    # More tokens where some of them stay in a window.
    steps = [19, 1, 16, 1] if p.retention.window else [9, 1, 5, 1]
    x = keys_like(1, 2, sum(steps), 64, torch.float32, 3)
    low, high = x.amin((0, 2)) * 0.8, x.amax((0, 2)) * 0.8
    ranges = static_qparams(p.codec, low, high) if p.codec.static_ranges else None
    parts = x.split(steps, dim=2)
    assert pack.unsupported_reason(parts[0], plan, ranges) is None
    got, wanted = pack.pack(parts[0], plan, ranges), ops.pack(parts[0], plan, ranges)
    same_state(got, wanted, plan)
    for state in (got, wanted):
        handle = PackedKV(state, replace(p, rope=None), steps[0], x.dtype)
        handle.grow("capacity", p.capacity(sum(steps)))
        state[:] = handle.state
    for part in parts[1:]:
        assert append.unsupported_reason(got, part, plan) is None
        append.append(got, part, plan)
        ops.append(wanted, part, plan)
        same_state(got, wanted, plan)


def test_a_key_that_is_no_number_is_an_outlier():
    plan = PLANS["nuq3-1%"][0]
    x = keys_like(1, 2, 8, 64, torch.float32)
    x[0, 1, 5, 7] = torch.nan
    ranges = static_qparams(parse_plan(plan).codec, *(x.nan_to_num().amin((0, 2)),) * 2)
    places, values = split_outliers(pack.pack(x, plan, ranges)[4][0, 4])
    assert values[places == 64 + 7].isnan().all()
    assert (places == 64 + 7).sum() == 1


@pytest.mark.parametrize("name", TAKEN)
def test_unpack(name):
    for plan, state in zip(TAKEN[name], states_of(TAKEN[name], 70, torch.float32, 2), strict=True):
        reason = unpack.unsupported_reason(state, 70, plan, torch.float32)
        if name == "token-scales":
            assert reason == "token scales are not supported"
            continue
        assert reason is None
        got, expected = (op(state, 70, plan, torch.float32) for op in (unpack.unpack, ops.unpack))
        assert relative_error(got, expected) <= FP32_TOLERANCE
