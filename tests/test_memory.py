"""What a packed cache holds, and what a prefill needs."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpass import PackedKV, recipe
from kvpass.bench.plans import layer_plan, packed_states
from kvpass.evaluate import cache_bytes
from kvpass.inner import provider
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
    _, cache = run_steps(compiled(model, name), ids, [tokens - 100] + [1] * 100)
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
    """6 layers: peak <= the model's own activations + one layer's K and V + the packed cache."""
    layers, tokens = 6, 4096
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
    assert one_layer + held < layers * one_layer / 3, "a cache kept plain would be far above that"


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_ten_thousand_steps_hold_nothing_but_codes() -> None:
    """Keys and values with outliers, through the provider that graphs call."""
    x = torch.randn(1, 2, 512, 64)
    plan = layer_plan("kvquant-nuq3-1%,window=0,sinks=1", x, x)
    keys = replace(plan.keys, rope=None)
    handles = []
    for tensor_plan, state in zip(
        (keys, plan.values), packed_states(replace(plan, keys=keys), x, x), strict=True
    ):
        handles.append(PackedKV(state, tensor_plan, 512, x.dtype))
    steps, held = 10_000, []
    new = torch.randn(steps, 1, 2, 1, 64)
    for step in range(steps):
        for i, handle in enumerate(handles):
            handle.reserve(1)
            append, _ = provider("append", handle.state, new[step], str(handle.plan))
            append(handle.state, new[step], str(handle.plan))
            handles[i] = handle.extended(1)
        if step in (steps // 5, steps - 1):
            held.append((resident(), sum(h.nbytes for h in handles)))
    (early, small), (late, large) = held
    growing = sum(
        getattr(h, name).nbytes for h in handles for name in ("codes", "qparams", "outliers")
    )
    fixed = large - growing
    # One token and a step of up to 16 exactly, sinks, ends and calibrated ranges.
    assert fixed <= 2 * 2 * (16 + 1) * 64 * 4 + 1024
    assert late - early <= large - small + (8 << 20)
