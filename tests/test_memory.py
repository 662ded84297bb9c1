"""What a packed cache holds, and what a prefill needs."""

from __future__ import annotations

import copy

import pytest
import torch

from kvpass import PackedKV, recipe
from kvpass.evaluate import cache_bytes
from tests.harness import compiled, left_padding, peak, run_steps
from tests.models import prompt, tiny_model


def formula(tokens: int, heads: int, dim: int, bits: int, itemsize: int) -> float:
    """Bytes of keys and values of one layer with KIVI, G = 32 and R = 128, from its definition."""
    group, residual = 32, 128
    keys_packed = tokens // residual * residual
    values_packed = max(tokens - residual, 0)
    codes = (keys_packed + values_packed) * dim * bits / 8
    scales = (keys_packed // group * dim + values_packed * (dim // group)) * 4
    windows = 2 * (residual + 16) * dim * itemsize
    return heads * (codes + scales + windows)


@pytest.mark.parametrize(("name", "tokens"), [("kivi-2bit", 1000), ("kivi-4bit", 1536)])
def test_bytes_held_match_the_formula(name: str, tokens: int) -> None:
    model = tiny_model("llama", head_dim=128, layers=2)
    ids = prompt(1, tokens)
    _, cache = run_steps(compiled(model, name), ids, [tokens - 200] + [1] * 200)
    held, _ = cache_bytes(cache)
    exact = 2 * formula(tokens, 2, 128, 2 if name == "kivi-2bit" else 4, 4)
    packed = exact - 2 * formula(0, 2, 128, 2, 4)
    growth = max(packed / 4, 2 * 2 * 2 * 128 * 2 * 128)
    assert 0.98 * exact <= held <= 1.02 * exact + growth


def test_two_bits_hold_at_most_three_point_three_at_8192_tokens() -> None:
    x = torch.randn(1, 2, 8192, 128, dtype=torch.bfloat16)
    plan = recipe("kivi-2bit").layer_plan("*", 128, 128)
    for tensor_plan in (plan.keys, plan.values):
        state = torch.ops.kvpass.pack(x, str(tensor_plan))
        packed = PackedKV(state, tensor_plan, 8192, x.dtype)
        assert packed.bits_per_element <= 3.3
        assert 8 * packed.nbytes / packed.numel() <= 3.3


def test_a_prefill_keeps_one_layer_plain_at_a_time() -> None:
    """16 layers: peak <= the model's own activations + one layer's K and V + the packed cache."""
    layers, tokens = 16, 2048
    model = tiny_model("llama", layers=layers, hidden_size=32, intermediate_size=32, head_dim=64)
    ids = prompt(1, tokens)
    # With padding every version of transformers makes a mask, compiled or not.
    options = {"logits_to_keep": 1, "attention_mask": left_padding([1], tokens)}
    packed, plain = compiled(model, "kivi-2bit", "inductor"), copy.deepcopy(model)
    plain.compile(backend="inductor")
    with torch.no_grad():
        packed(ids, use_cache=True, **options)
        plain(ids, use_cache=False, **options)
        own = peak(lambda: plain(ids, use_cache=False, **options))
        with_cache = peak(lambda: packed(ids, use_cache=True, **options))
        held, _ = cache_bytes(packed(ids, use_cache=True, **options).past_key_values)
    one_layer = 2 * 2 * tokens * 64 * 4
    assert with_cache <= own + one_layer + held, (with_cache, own, one_layer, held)
    assert one_layer + held < layers * one_layer / 4, "a cache kept plain would be far above that"
