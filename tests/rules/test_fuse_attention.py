"""Attention over a packed cache becomes ``kvpass.attention``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf

from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import recipe
from tests.graph.recorder import Layer, Recorder, run
from tests.strategies import randn


def repeated(x):
    b, h, t, d = x.shape
    return x[:, :, None, :, :].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)


def causal(q, keys):
    n, t = q.shape[2], keys.shape[2]
    return (torch.arange(t) <= torch.arange(t - n, t)[:, None])[None, None]


def additive(q, keys):
    return torch.where(causal(q, keys), 0.0, torch.finfo(torch.float32).min)


def sdpa(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def sdpa_repeated(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(
        q, repeated(keys), repeated(values), attn_mask=causal(q, keys), scale=0.3
    )


def eager(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, repeated(keys).transpose(2, 3)) * 0.25 + additive(q, keys)
    weights = nnf.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(nnf.dropout(weights, p=0.1, training=False), repeated(values))


def eager_divided(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = additive(q, keys) + q @ repeated(keys).transpose(-1, -2) / 4.0
    return torch.softmax(scores, -1) @ repeated(values)


def eager_prescaled(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q * 0.25, repeated(keys).transpose(2, 3))
    return torch.matmul(nnf.softmax(scores, -1), repeated(values))


FORMS = {
    "sdpa": (sdpa, "sdpa attention, no mask, scale 0.25"),
    "sdpa repeated": (sdpa_repeated, "sdpa attention, mask tensor, scale 0.3"),
    "eager": (eager, "matmul attention, mask tensor, scale 0.25"),
    "eager divided": (eager_divided, "matmul attention, mask tensor, scale 0.25"),
    "eager prescaled": (eager_prescaled, "matmul attention, no mask, scale 1"),
}


@pytest.mark.parametrize(("function", "detail"), FORMS.values(), ids=FORMS)
def test_applies_to_every_form(function, detail):
    prefill, decode, verify = run(function, [20, 1, 3], recipe("kivi-2bit", group=8, residual=8))
    assert prefill.fired("fuse_attention") == 0
    for record, n in ((decode, 1), (verify, 3)):
        assert record.refused() == []
        assert [e.detail for e in record.events if e.rule == "fuse_attention"] == [detail]
        (fused,) = record.after.graph.find_nodes(op="call_function", target=logical.attention)
        assert fused.meta["example_value"].shape == (1, 4, n, 16)
        targets = {str(node.target) for node in record.after.graph.nodes}
        assert not any("scaled_dot_product" in t or "softmax" in t for t in targets)


PLANS = [
    ("fp", "int2.token8/window=4,pack_every=2"),
    ("int4.channel4/window=3,pack_every=8", "fp"),
    ("int8.token16/window=19,pack_every=1", "int2.channel2/window=19,pack_every=2"),
]


# run() checks: attention(q, K, V) = the original subgraph on the decoded K and V, step by step.
@pytest.mark.parametrize(("keys", "values"), PLANS)
@pytest.mark.parametrize("function", [sdpa_repeated, eager_divided])
def test_numbers_agree(function, keys, values):
    plan = Plan(LayerPlan(parse_plan(keys), parse_plan(values)))
    records = run(function, [20, 16, 16, 1], plan)
    assert all(record.fired("fuse_attention") == 1 for record in records[1:])


def top_left(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)


def test_refuses_a_causal_triangle_over_a_filled_cache():
    prefill, several = run(top_left, [20, 3])
    assert prefill.refused() == []
    assert several.fired("quantize_cache") == 2
    assert several.fired("fuse_attention") == 0
    reason = "is_causal with a filled cache and several new tokens"
    assert several.refused() == [("fuse_attention", f"{reason} (at scaled_dot_product_attention)")]
    assert len(several.after.graph.find_nodes(op="call_function", target=logical.unpack)) == 2


def test_one_new_token_may_be_called_causal():
    layer, recorder = Layer(), Recorder()
    with torch.no_grad():
        for n in (20, 1):
            torch._dynamo.reset()
            torch.compile(top_left, backend=recorder)(
                randn(1, 4, n, 16), randn(1, 2, n, 16), randn(1, 2, n, 16), layer
            )
    assert recorder.records[1].fired("fuse_attention") == 1
    assert recorder.records[1].refused() == []


def test_mutations_beside_the_attention_are_kept():
    def counting(q, k, v, layer, counter):
        counter.add_(1)
        return sdpa(q, k, v, layer)

    counter = torch.zeros(3)
    recorder = Recorder()
    compiled, layer = torch.compile(counting, backend=recorder), Layer()
    with torch.no_grad():
        for n in (20, 1):
            compiled(randn(1, 4, n, 16), randn(1, 2, n, 16), randn(1, 2, n, 16), layer, counter)
    assert recorder.records[1].fired("fuse_attention") == 1
    assert counter.tolist() == [2.0, 2.0, 2.0]
