"""Orders at the boundary of the cache: attention and cache see the channels permuted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass import ChannelOrder, LayerPlan, Plan
from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from tests.bases import free
from tests.graph.recorder import Record, run
from tests.rules.test_fuse_attention import eager, sdpa, sdpa_repeated
from tests.strategies import SEEDS, randn

KEYS = parse_plan("int4.token8/window=4,pack_every=4")


def order(seed: int, heads: int = 2, dim: int = 16) -> ChannelOrder:
    return ChannelOrder.of(free(heads, dim, torch.Generator().manual_seed(seed)))


ORDERED = Plan(LayerPlan(key_basis=order(1), value_basis=order(2)))
CODED = Plan(LayerPlan(KEYS, KEYS, key_basis=order(1), value_basis=order(2)))


def gathers(record: Record) -> int:
    found = record.after.graph.find_nodes(op="call_function", target=logical.rotate_channels)
    return len(found)


# run() checks that the results of both graphs agree.
@pytest.mark.parametrize("attend", [sdpa, sdpa_repeated, eager])
def test_applies_to_prompts_and_steps(attend):
    prefill, decode, *more = run(attend, [20, 1, 3, 20], ORDERED)
    for record in (prefill, decode, *more):
        assert record.fired("rotate_channels") >= 3
        # Nothing computes q, k and v here, and what reads the output is unknown.
        reasons = [detail for _, detail in record.refused()]
        assert gathers(record) == len(reasons) == 4
        for detail in reasons:
            assert detail.startswith("channels are gathered in every call: ")


def test_does_not_apply_without_orders():
    for record in run(sdpa, [20, 1], Plan()):
        assert record.fired("rotate_channels") == 0
        assert record.refused() == []


def test_codecs_see_permuted_channels():
    run(sdpa, [20, 1, 1], CODED)


@pytest.mark.parametrize("kind", ["key_basis", "value_basis"])
def test_one_order_alone(kind):
    plan = Plan(LayerPlan(**{kind: order(3)}))
    for record in run(eager, [20, 1], plan):
        # q and k, or v and the output.
        assert gathers(record) == 2


def test_keys_that_are_read_elsewhere_stay_in_the_models_order():
    def attend(q, k, v, layer):
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True), keys.sum(-2)

    prefill, decode = run(attend, [20, 1], ORDERED)
    refused = dict(prefill.refused())
    assert refused["rotate_channels"] == "l_k_ is read by sum as well (at sum_1)"
    # The cache is decoded for the sum, in the model's order.
    assert any("read in the model's basis" in detail for _, detail in decode.refused())


def test_what_is_changed_in_place_is_permuted_when_it_is_read():
    def attend(q, k, v, layer):
        k, q = k * 2, (q * 2).transpose(1, 2)
        k.mul_(3.0)
        other = q.transpose(1, 2)
        q.add_(1.0)
        keys, values = layer.update(k, v)
        out = nnf.scaled_dot_product_attention(other, keys, values, enable_gqa=True)
        q.add_(1.0)
        return out + 0, q

    for record in run(attend, [20, 1], ORDERED):
        assert any("changed in place" in detail for _, detail in record.refused())


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), SEEDS)
def test_attention_has_no_order(kv_heads, groups, dim, past, seed):
    """attention(q, K, V) = Pv^-1(attention(Pk(q), Pk(K), Pv(V)))."""
    k, v = (randn(2, kv_heads, past + 1, dim, seed=s) for s in (1, 2))
    q = randn(2, kv_heads * groups, 1, dim)
    keys, values = (order((seed + s) % 2**32, kv_heads, dim) for s in (3, 4))

    def repeated(x: ChannelOrder) -> ChannelOrder:
        return ChannelOrder.of(x.tensor().repeat_interleave(groups, dim=0))

    def attention(*args: Any) -> torch.Tensor:
        return nnf.scaled_dot_product_attention(*args, enable_gqa=True)

    out = attention(repeated(keys).store(q), keys.store(k), values.store(v))
    assert_close(repeated(values).restore(out), attention(q, k, v), rtol=0, atol=2e-6)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9), SEEDS)
def test_append_is_restored(heads, dim, past, seed):
    """append(past, new) = restore(append'(past, P(new)))."""
    kept = order(seed, heads, dim)
    first, new = randn(2, heads, past, dim), randn(2, heads, 2, dim, seed=1)
    packed = logical.append(None, kept.store(first), "fp", False, kept.tensor())
    packed = logical.append(packed, kept.store(new), "fp", False, kept.tensor())
    assert_close(packed.decode(), torch.cat([first, new], dim=2), rtol=0, atol=0)
    assert_close(packed.stored(), kept.store(packed.decode()), rtol=0, atol=0)
