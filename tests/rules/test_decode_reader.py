"""Readers that are part of no fused attention get the cache decoded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from transformers import StaticCache

from kvpass import rules
from kvpass.ops import logical
from kvpass.recipes import recipe
from tests.graph.recorder import run
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import logits

KIVI = recipe("kivi-2bit", group=8, residual=8)


def decoded(record):
    return [event.detail for event in record.events if event.rule == "decode_reader"]


def unpacks(record):
    return len(record.after.graph.find_nodes(op="call_function", target=logical.unpack))


def projected(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.linear(keys, torch.eye(16)) @ q[:, :2].mT, values.sum(), values.exp()


def test_applies_once_a_tensor_and_says_why():
    prefill, decode = run(projected, [20, 3], KIVI)
    assert decoded(prefill) == []
    assert decode.refused() == []
    assert sorted(decoded(decode)) == [
        "decoded in front of linear: it is part of no known attention (at append)",
        "decoded in front of sum, exp: it is part of no known attention (at append_1)",
    ]
    assert unpacks(decode) == 2


def test_a_fused_attention_needs_no_decoding():
    def plain(q, k, v, layer):
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, keys, values, enable_gqa=True), keys.shape[2]

    for record in run(plain, [20, 3], KIVI):
        assert decoded(record) == []
        assert unpacks(record) == 0


def test_a_reader_beside_a_fused_attention():
    """Doge: the mask is computed from the values."""

    def weighed(q, k, v, layer):
        keys, values = layer.update(k, v)
        mask = values.mean(dim=(1, 3))[:, None, None]
        return nnf.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    prefill, decode, verify = run(weighed, [20, 1, 3], KIVI)
    assert prefill.refused() == []
    for record in (decode, verify):
        assert record.fired("fuse_attention") == 1
        assert decoded(record) == [
            "decoded in front of mean: it is part of no known attention (at append_1)"
        ]


def test_numbers_agree_on_the_decoded_cache():
    for lengths in ([20, 1, 16, 1], [3, 3]):
        torch._dynamo.reset()
        records = run(projected, lengths, recipe("kivi-4bit", group=4, residual=4))
        assert all(record.fired("quantize_cache") == 2 for record in records)


@pytest.mark.parametrize(("family", "static"), [("mistral", False), ("llama", True)])
def test_other_caches_can_be_decoded(family, static, monkeypatch):
    """Sliding and static ones, with no attention fused."""
    monkeypatch.setattr(rules, "RULES", [r for r in rules.RULES if r.name != "fuse_attention"])
    model, steps = tiny_model(family, layers=1), [40, 1, 1, 3, 1]
    ids = prompt(1, sum(steps))
    cache = StaticCache(config=model.config, max_cache_len=64) if static else None
    twin = compiled(model, recipe("fp"))
    wanted, _ = run_steps(model, ids, steps)
    got, cache = run_steps(twin, ids, steps, cache=cache)
    assert cache.layers[0].keys.plan.codec.identity
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
