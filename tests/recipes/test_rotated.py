"""Rotated keys and values: what is compiled, what is saved, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from kvpass import ChannelRotation, Plan, calibrate, oracle_cache, recipe
from kvpass.errors import OptionError, PlanError
from kvpass.format.hadamard import hadamard
from kvpass.recipes import written_recipe
from tests.harness import compiled, error_to_oracle
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODES_FP32

TEXTS = [prompt(1, 60, seed=i)[0] for i in range(4)]
FIELDS: dict[str, Any] = {"group": 8, "window": 8, "sinks": 3}
STEPS = [20, 1, 1, 5, *[1] * 9]


def plan_for(model: Any, name: str, **fields: Any) -> Plan:
    found = replace(written_recipe(name), **(FIELDS | fields))
    if not found.calibrated:
        return found.plan(model.config)
    torch._dynamo.reset()
    return calibrate(model, found, TEXTS, progress=False, batch=2)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("rotated-4bit", "llama"),
        ("rotated-k4v2", "qwen3"),
        ("rotated-2bit", "glm4"),
        ("rotated-4bit,before_rope=True", "qwen2"),
    ],
)
def test_compiled_equals_the_oracle(name: str, family: str) -> None:
    model = tiny_model(family, layers=1)
    plan = plan_for(model, name)
    assert isinstance(plan.layer_at(0).value_basis, ChannelRotation)
    twin = compiled(model, plan, strict=True)
    ids = prompt(2, sum(STEPS), seed=9)
    assert error_to_oracle(twin, model, plan, ids, STEPS) <= LOGITS_CODES_FP32


@pytest.mark.parametrize("name", ["rotated-4bit", "rotated-k4v2", "rotated-2bit"])
def test_saved_plans_load_back(name: str, tmp_path: Any) -> None:
    plan, path = plan_for(tiny_model(layers=1), name), tmp_path / "plan.safetensors"
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan.recipe == name


def test_every_option_changes_the_plan() -> None:
    model = tiny_model(layers=1)
    layer = plan_for(model, "rotated-2bit").layer_at(0)
    assert layer.key_basis != layer.value_basis
    assert isinstance(layer.keys.codec.clip, tuple)
    assert str(layer.keys).startswith("int2.token8.fp8.clip")
    fields = {"key_rotation": False, "value_rotation": "hadamard", "clip": False}
    more = {"levels": True, "group": 16, "fp8": False}
    layer = plan_for(model, "rotated-2bit", **fields, **more).default
    assert layer.key_basis is None
    assert layer.value_basis == ChannelRotation.of(hadamard(16, 0).unsqueeze(0))
    assert str(layer.keys).startswith("nuq2.token16.codebook-0.8")
    layer = plan_for(model, "rotated-4bit", before_rope=True).default
    assert layer.before_rope
    assert (layer.keys.codec.qparams, layer.values.codec.qparams) == ("half", "fp8")
    layer = plan_for(model, "rotated-k4v2").default
    assert str(layer.keys) == "int4.channel8.fp8/sinks=3,window=8,pack_every=8"
    assert str(layer.values) == "int2.token8.fp8.clip0.8/sinks=3,window=8,pack_every=1"


@torch.no_grad()
def test_keys_with_large_biases_need_before_rope() -> None:
    """Behind RoPE a bias widens the range of a channel; in front of it, it moves that."""
    model = tiny_model("qwen2", layers=2)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        bias.copy_(600 * normalize(torch.randn_like(bias), dim=0))
    ids = prompt(2, 240, seed=3)
    expected = model(input_ids=ids).logits[:, 200:].log_softmax(-1)
    apart = []
    for before_rope in (False, True):
        plan = recipe("rotated-4bit", window=8, before_rope=before_rope).plan(model.config)
        cache = oracle_cache(plan, model.config, model)
        model(input_ids=ids[:, :200], past_key_values=cache)
        found = model(input_ids=ids[:, 200:], past_key_values=cache).logits.log_softmax(-1)
        apart.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
    assert 0 < 5 * apart[1] < apart[0]


def test_groups_fit_heads_unless_they_are_given() -> None:
    layer = recipe("rotated-k4v2").layer_plan("*", 80, 80)
    assert str(layer.values.codec) == "int2.token16.fp8.clip0.8"
    assert recipe("rotated-4bit").unknown_plan("*", 48).codec.group == 16
    assert recipe("rotated-4bit").unknown_plan("*", 0).codec.identity
    with pytest.raises(PlanError, match="group 32 does not divide head_dim 80"):
        recipe("rotated-k4v2", group=32).layer_plan("*", 80, 80)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_bits": 5}, r"key_bits=5 is not supported; allowed: 2, 3, 4, 8\."),
        ({"key_axis": "head"}, r"key_axis='head' .* allowed: 'channel', 'token'\."),
        (
            {"key_rotation": "random"},
            r"key_rotation='random' .* allowed: 'hadamard', 'eigen', False\.",
        ),
        (
            {"before_rope": True, "key_rotation": "hadamard"},
            r"key_rotation='hadamard' .* before_rope=True; allowed: False\.",
        ),
        ({"clip": 1.5}, r"clip=1.5 .* True \(searched\), False, or a number above 0"),
        ({"levels": True, "clip": 0.9}, r"levels=True .* clip=0.9 .*; allowed: clip=False"),
        ({"window": -1}, "window=-1 is not supported"),
        ({"group": 1}, "group=1 is not supported"),
    ],
)
def test_bad_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        recipe("rotated-4bit", **fields)


def test_levels_need_groups_of_a_head() -> None:
    with pytest.raises(PlanError, match=r"levels=True .* groups of 32 of a head's 64 channels"):
        recipe("rotated-4bit", levels=True, group=32).layer_plan("*", 64, 64)


def test_calibrated_options_ask_for_texts() -> None:
    with pytest.raises(PlanError, match="Recipe 'rotated-2bit' is calibrated"):
        recipe("rotated-2bit").layer_plan("*", 64, 64)


def test_one_kv_head_is_warned_of() -> None:
    assert "multi-query" in str(recipe("rotated-2bit").warning(4, 1))
    assert recipe("rotated-k4v2").warning(4, 1) is None
