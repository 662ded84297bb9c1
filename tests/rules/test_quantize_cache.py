"""``cat([past, new])`` becomes ``append(past, new)``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from transformers import DynamicCache

from kvpass.errors import PlanError
from kvpass.format.parse import parse_plan
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
            "keys int2.channel8/window=0,pack_every=16",
            "values int2.token8/window=16,pack_every=1",
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
        ("int2.channel8/window=0,pack_every=8", "int2.token8/window=7,pack_every=1"),
        ("int4.channel4/window=30,pack_every=4", "int8.token16/window=0,pack_every=3"),
    ],
)
def test_numbers_agree(keys, values):
    plan = Plan(LayerPlan(parse_plan(keys), parse_plan(values)))
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
    assert details(recorder.records[0])[0] == "keys int4.channel8/window=0,pack_every=16"


def test_a_plan_that_does_not_fit_is_an_error():
    bad = Plan(LayerPlan(values=parse_plan("int2.token24/window=128,pack_every=1")))
    with pytest.raises(PlanError, match="group 24 does not divide head_dim 16"):
        run(attend, [20], bad)


def changed(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values.mul_(2.0), enable_gqa=True)


def changed_in_part(q, k, v, layer):
    keys, values = layer.update(k, v)
    values[:, :, :, :2].zero_()
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


@pytest.mark.parametrize("function", [changed, changed_in_part])
def test_refuses_a_cache_that_is_changed_in_place(function):
    torch._dynamo.reset()
    (record,) = run(function, [20])
    reason = "the updated cache tensor is changed in place (at values)"
    assert record.refused() == [("quantize_cache", reason)]
    assert record.fired("quantize_cache") == 1


def changed_after_it_was_cached(q, k, v, layer):
    k = k + 1.0
    keys, values = layer.update(k, v)
    k[:, :, 1:].mul_(3.0)
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def test_refuses_new_keys_that_are_changed_after_they_were_cached():
    """The cache holds what they were; the packed one would be made later."""
    torch._dynamo.reset()
    (record,) = run(changed_after_it_was_cached, [20])
    ((rule, reason),) = record.refused()
    assert rule == "quantize_cache"
    assert "is changed in place after it was cached" in reason
    assert record.fired("quantize_cache") == 1


def copied_from(q, k, v, layer):
    keys, values = layer.update(k, v)
    both = keys.new_empty(keys.shape)
    both[:, :, :, :8].copy_(keys[:, :, :, :8])
    both[:, :, :, 8:].copy_(values[:, :, :, :8])
    return nnf.scaled_dot_product_attention(q, both, values, enable_gqa=True)


def test_a_cache_may_be_copied_from_in_place():
    for record in run(copied_from, [20, 3]):
        assert record.refused() == []
        assert record.fired("quantize_cache") == 2


def latent(q, k, v, layer):
    """Multi-head latent attention in small: "keys" are projected, "values" expanded."""
    keys, values = layer.update(k[:, :1], v[:, :1, :, :6])
    projected = nnf.linear(keys, torch.ones(10, 16) / 16)
    both = torch.cat([projected, values], dim=-1).expand(-1, 4, -1, -1)
    return nnf.scaled_dot_product_attention(q, both, both)


def test_tensors_of_unknown_meaning_are_packed_per_token():
    records = run(latent, [20, 3, 20, 1], recipe("kivi-2bit", group=8, residual=8))
    for record in records:
        # Six channels at four bits do not fill whole words.
        problem = "head_dim 6 at 4 bits does not fill whole 16-bit words (at values)"
        reason = f"The cache of layer '' cannot be stored as int4.token2: {problem}"
        assert record.refused() in ([("quantize_cache", reason)], [])
        assert details(record)[-1] == "unknown int4.token8/window=8,pack_every=1"
    assert records[0].refused() != []


def test_a_prefill_packs_behind_the_last_reader():
    (prefill,) = run(latent, [20], recipe("fp"))
    names = [node.name for node in prefill.after.graph.nodes]
    assert prefill.fired("quantize_cache") == 2
    append = prefill.after.graph.find_nodes(op="call_function", target=logical.append)
    assert all(names.index(a.name) > names.index("projected") for a in append)
    assert prefill.fired("decode_reader") == 0


def shared(q, k, v, layer):
    """Two attentions over one update."""
    keys, values = layer.update(k, v)
    first = nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return nnf.scaled_dot_product_attention(first, keys, values, enable_gqa=True)


def test_every_attention_over_one_update_is_fused():
    prefill, decode, verify = run(shared, [20, 1, 3], recipe("kivi-2bit", group=8, residual=8))
    names = [str(node.target) for node in prefill.after.graph.nodes]
    last = max(i for i, name in enumerate(names) if "scaled_dot_product" in name)
    assert [i for i, name in enumerate(names) if "append" in name and i < last] == []
    for record in (decode, verify):
        assert record.fired("fuse_attention") == 2
        assert not record.after.graph.find_nodes(op="call_function", target=logical.unpack)


def test_a_window_slides():
    model = tiny_model("mistral", layers=1, sliding_window=24)
    recorder = Recorder(recipe("kivi-2bit", group=8, residual=8))
    model.forward = torch.compile(model.forward, backend=recorder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for n in (30, *[1] * 40, 20, 5):
            model(prompt(1, n), past_key_values=cache)
            recorder.records[-1].check(atol=2e-6)
            assert cache.layers[0].keys.shape[2] == 23
    for record in recorder.records:
        assert record.fired("quantize_cache") == 2
        assert record.refused() == []
        assert details(record) == [
            "keys int2.channel8/window=0,pack_every=8/window_size=23",
            "values int2.token8/window=8,pack_every=1/window_size=23",
        ]
        decoded = record.after.graph.find_nodes(op="call_function", target=logical.unpack)
        assert not (decoded and record.fired("fuse_attention"))


def test_a_window_within_the_exact_one_is_kept_as_it_is():
    model = tiny_model("mistral", layers=1, sliding_window=16)
    recorder = Recorder(recipe("kivi-2bit", group=8, residual=16))
    model.forward = torch.compile(model.forward, backend=recorder)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for n in (30, *[1] * 20):
            model(prompt(1, n), past_key_values=cache)
            recorder.records[-1].check(atol=2e-6)
    assert details(recorder.records[-1]) == ["keys fp/window_size=15", "values fp/window_size=15"]


def keep_all_but_the_first(q, k, v, layer):
    keys, values = layer.update(k, v)
    layer.keys, layer.values = keys[:, :, 1:], values[:, :, 1:]
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def test_another_part_of_the_cat_is_left_alone():
    (record,) = run(keep_all_but_the_first, [20])
    assert record.sites.updates == {}
    reasons = [reason for _, reason in record.refused()]
    assert len(reasons) == 2
    assert all("a part of the updated tensor, not its last tokens" in r for r in reasons)
    assert record.after.code == record.before.code
