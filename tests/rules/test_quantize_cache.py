"""``cat([past, new])`` becomes ``append(past, new)``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from transformers import DynamicCache

from kvpass.cache.residency import TensorPlan
from kvpass.errors import PlanError
from kvpass.ops import logical
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import recipe
from tests.graph.recorder import Layer, Recorder, run
from tests.models import prompt, tiny_model
from tests.strategies import randn


def attend(q, k, v, layer, mask=None):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def details(record):
    return sorted(event.detail for event in record.events if event.rule == "quantize_cache")


def test_applies_to_keys_and_values():
    kivi = recipe("kivi-2bit", group=8, residual=16)
    prefill, decode = run(attend, [20, 1], kivi)
    for record in (prefill, decode):
        assert record.fired("quantize_cache") == 2
        assert record.refused() == []
        assert details(record) == [
            "keys int2.channel8/window=0,flush=16",
            "values int2.token8/window=16,flush=1",
        ]
        appends = record.after.graph.find_nodes(op="call_function", target=logical.append)
        assert len(appends) == 2
        assert not record.after.graph.find_nodes(op="call_function", target=torch.cat)


def test_a_prefill_packs_behind_its_own_attention():
    (prefill,) = run(attend, [20])
    names = [node.target for node in prefill.after.graph.nodes if node.op == "call_function"]
    sdpa = next(
        i for i, n in enumerate(names) if "attention" in str(n) and n not in logical.LOGICAL
    )
    assert all(i > sdpa for i, n in enumerate(names) if n is logical.append)
    assert not prefill.fired("fuse_attention")


def test_a_further_prompt_attends_to_the_decoded_past():
    _, more = run(attend, [20, 20], recipe("kivi-2bit", group=8, residual=16))
    assert len(more.after.graph.find_nodes(op="call_function", target=logical.unpack)) == 2
    assert len(more.after.graph.find_nodes(op="call_function", target=logical.append)) == 2
    assert not more.fired("fuse_attention")


# run() checks: after(past) = before(past with what is due rounded), for every step.
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("int2.channel8/window=0,flush=8", "int2.token8/window=7,flush=1"),
        ("int4.channel4/window=30,flush=4", "int8.token16/window=0,flush=3"),
    ],
)
def test_numbers_agree(keys, values):
    plan = Plan(LayerPlan(TensorPlan.parse(keys), TensorPlan.parse(values)))
    records = run(attend, [20, 1, 16, 20, 1], plan)
    assert all(record.fired("quantize_cache") == 2 for record in records)


def test_a_filled_cache_goes_on_as_it_was_begun():
    class Fickle(type(recipe("fp"))):
        def layer_plan(self, path, key_dim, value_dim):
            raise PlanError("asked again")

    layer = Layer()
    for planner, n in ((recipe("kivi-4bit", group=8, residual=16), 20), (Fickle(), 1)):
        torch._dynamo.reset()
        recorder = Recorder(planner)
        with torch.no_grad():
            torch.compile(attend, backend=recorder)(
                randn(1, 4, n, 16), randn(1, 2, n, 16), randn(1, 2, n, 16), layer
            )
    assert details(recorder.records[0])[0] == "keys int4.channel8/window=0,flush=16"


def test_a_plan_that_does_not_fit_is_an_error():
    bad = Plan(LayerPlan(values=recipe("kivi-2bit", group=32).layer_plan("*", 32, 32).values))
    with pytest.raises(PlanError, match="group 32 does not divide head_dim 16"):
        run(attend, [20], bad)


def softcapped(q, k, v, layer):
    keys, values = layer.update(k, v)
    keys, values = (
        x[:, :, None].expand(1, 2, 2, -1, 16).reshape(1, 4, -1, 16) for x in (keys, values)
    )
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25
    scores = torch.tanh(scores / 30.0) * 30.0
    return torch.matmul(nnf.softmax(scores, dim=-1), values)


def dropped(q, k, v, layer):
    keys, values = layer.update(k, v)
    keys, values = (
        x[:, :, None].expand(1, 2, 2, -1, 16).reshape(1, 4, -1, 16) for x in (keys, values)
    )
    weights = nnf.softmax(torch.matmul(q, keys.transpose(2, 3)) * 0.25, dim=-1)
    weights = nnf.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, values)


def dropped_sdpa(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, dropout_p=1e-9, enable_gqa=True)


def flat_mask(q, k, v, layer):
    keys, values = layer.update(k, v)
    mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool)
    return nnf.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def swapped(q, k, v, layer):
    keys, _ = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, v, enable_gqa=True)


REFUSED = {
    "soft-capping": (softcapped, "tanh, expected matmul (at tanh)"),
    "dropout": (dropped, "True, expected no dropout (at weights_1)"),
    "sdpa dropout": (dropped_sdpa, "1e-09, expected no dropout (at scaled_dot_product_attention)"),
    "mask": (flat_mask, "the mask is not four-dimensional (at mask)"),
    "other values": (
        swapped,
        "values come from placeholder, not from a cache update (at l_v_)",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_refuses_and_the_graph_runs_unchanged(function, reason):
    (record,) = run(function, [20])
    assert record.fired("quantize_cache") == 0
    assert record.fired("fuse_attention") == 0
    assert record.refused() == [("quantize_cache", reason)] * 2
    assert record.after.code == record.before.code


def test_a_sliced_cat_is_left_alone():
    model = tiny_model("mistral", layers=1, sliding_window=8)
    recorder = Recorder(recipe("kivi-2bit"))
    model.forward = torch.compile(model.forward, backend=recorder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for n in (20, 1):
            model(prompt(1, n), past_key_values=cache)
            recorder.records[-1].check(atol=0)
    assert len(recorder.records) == 2
    for record in recorder.records:
        assert record.sites.updates == {}
        reasons = [reason for _, reason in record.refused()]
        assert len(reasons) == 2
        assert all("the cache keeps a slice of the updated tensor" in r for r in reasons)
        assert record.after.code == record.before.code
