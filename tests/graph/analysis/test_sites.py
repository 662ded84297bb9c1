"""Cache updates and attentions are found in the graphs of real model families."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as nnf
from transformers import DynamicCache

from kvpass.format.retention import MAX_STEP
from kvpass.graph.analysis.sites import nearest_miss, reads_update
from kvpass.graph.spellings import argument, op_name
from kvpass.recipes import recipe
from tests import tolerances
from tests.graph.recorder import Layer, Record, Recorder, run
from tests.models import FAMILIES, prompt, tiny_model
from tests.strategies import randn

CASES = [(family, "sdpa") for family in FAMILIES] + [("llama", "eager"), ("opt", "eager")]
EACH = pytest.mark.parametrize(("family", "attention"), CASES)


def steps(family: str, attention: str) -> tuple[int, ...]:
    """A prompt and several tokens; for one family also a single token and a further prompt."""
    return (20, 1, 3, 20) if (family, attention) == ("llama", "sdpa") else (20, 3)


@cache
def recorded(family: str, attention: str) -> tuple[Record, ...]:
    """One graph a step, each checked against the original one."""
    torch._dynamo.reset()
    lengths = steps(family, attention)
    model = tiny_model(family, attention=attention, layers=len(lengths) // 2)
    recorder = Recorder(recipe("kivi-2bit", group=8, residual=16))
    model.forward = torch.compile(model.forward, backend=recorder)
    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        for i, n in enumerate(lengths):
            model(prompt(2, n, seed=i), past_key_values=filled)
            recorder.records[-1].check(tolerances.logits(torch.float32))
    return tuple(recorder.records)


@EACH
def test_one_graph_a_step_and_two_updates_a_layer(family, attention):
    records, lengths = recorded(family, attention), steps(family, attention)
    assert len(records) == len(lengths)
    for record, n in zip(records, lengths, strict=True):
        assert len(record.sites.updates) == len(lengths)
        for cat, update in record.sites.updates.items():
            assert op_name(cat) == "cat"
            assert (update.past is not None) == (record is not records[0])
            assert update.new.meta["example_value"].shape[2] == n


@EACH
def test_attention_reads_keys_and_values(family, attention):
    records = recorded(family, attention)
    layers = len(steps(family, attention)) // 2
    for record in records:
        sites = record.sites
        assert [m for m in sites.misses if reads_update(m.node, sites)] == []
        assert len(sites.attentions) == layers
        for site in sites.attentions:
            assert site.form == ("sdpa" if attention == "sdpa" else "matmul")
            assert sites.roles[site.keys] == ("keys", site)
            assert sites.roles[site.values] == ("values", site)
            q = site.q.meta["example_value"]
            assert site.scale == pytest.approx(1.0 if family == "opt" else q.shape[3] ** -0.5)
            assert site.root.meta["example_value"].shape == q.shape
        for i, site in enumerate(sites.attentions):
            assert f".{i}." in site.path
            assert site.path.split(".")[-1] in ("self_attn", "attention", "self_attention")


@EACH
def test_rules_apply_to_every_site(family, attention):
    records, lengths = recorded(family, attention), steps(family, attention)
    for i, (record, n) in enumerate(zip(records, lengths, strict=True)):
        assert record.refused() == []
        assert record.fired("quantize_cache") == len(lengths)
        fused = len(lengths) // 2 if i > 0 and n <= MAX_STEP else 0
        assert record.fired("fuse_attention") == fused


def test_masks_and_repeated_heads_of_llama():
    prefill, decode, verify, more = (r.sites.attentions[0] for r in recorded("llama", "sdpa"))
    # Older versions of transformers always make a mask for a compiled model.
    if prefill.mask is None:
        assert (prefill.causal, decode.mask, decode.causal) == (True, None, False)
        masked = (verify, more)
    else:
        masked = (prefill, decode, verify, more)
    for site in masked:
        assert site.mask.meta["example_value"].dim() == 4
        assert not site.causal
    # With a mask, transformers repeats the KV heads; the site still is the cat itself.
    assert op_name(argument(verify.root, "key")) == "reshape"
    assert op_name(verify.keys) == "cat"


def plain(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def test_a_reader_that_no_form_knows():
    def linear(q, k, v, layer):
        keys, values = layer.update(k, v)
        return nnf.linear(keys, torch.eye(16)), values.sum()

    (record,) = run(linear, [20])
    assert record.sites.attentions == []
    assert {str(nearest_miss(cat, record.sites)) for cat in record.sites.updates} == {
        "it is part of no known attention (at keys)",
        "it is part of no known attention (at values)",
    }


def test_one_tensor_as_keys_and_values_has_no_role():
    def tied(q, k, v, layer):
        keys, _ = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, keys, keys, enable_gqa=True)

    (record,) = run(tied, [20])
    (site,) = record.sites.attentions
    assert record.sites.roles[site.keys] == ("unknown", site)


def test_cat_that_is_not_the_cache_is_none_of_our_business():
    def inside(q, k, v, layer):
        keys, values = layer.update(k, v)
        joined = torch.cat([k, v], dim=-2)
        return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True), joined

    (record,) = run(inside, [20])
    assert len(record.sites.updates) == 2
    assert record.fired("quantize_cache") == 2


def test_plain_past_is_taken_over():
    recorder = Recorder()
    layer = Layer(randn(1, 2, 20, 16), randn(1, 2, 20, 16, seed=1))
    with torch.no_grad():
        torch.compile(plain, backend=recorder)(
            randn(1, 4, 1, 16), randn(1, 2, 1, 16), randn(1, 2, 1, 16), layer
        )
    (record,) = recorder.records
    record.check(atol=0)
    assert record.fired("quantize_cache") == 2
    assert [u.new is cat for cat, u in record.sites.updates.items()] == [True, True]
    assert layer.keys.shape[2] == 21
