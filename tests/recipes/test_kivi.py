"""KIVI's plans: keys per channel, values per token, an exact window."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from kvpass.errors import PlanError
from kvpass.format.codec import FP
from kvpass.plan import LayerPlan
from kvpass.recipes import Fp, Kivi, recipe


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_keys_and_values(bits):
    plan = Kivi(bits=bits).layer_plan("model.layers.0.self_attn", 128, 128)
    assert str(plan.keys) == f"int{bits}.channel32/window=0,pack_every=128"
    assert str(plan.values) == f"int{bits}.token32/window=128,pack_every=1"
    assert Kivi(bits=bits).name == f"kivi-{bits}bit"


@pytest.mark.parametrize(("dim", "group"), [(16, 16), (64, 32), (80, 16), (96, 32), (128, 32)])
def test_values_fall_back_to_the_largest_group_that_fits(dim, group):
    assert Kivi().layer_plan("*", dim, dim).values.codec.group == group


def test_fields():
    plan = Kivi(bits=2, group=16, residual=64).layer_plan("*", 64, 64)
    assert str(plan.keys) == "int2.channel16/window=0,pack_every=64"
    assert str(plan.values) == "int2.token16/window=64,pack_every=1"


def test_bits_of_keys_and_of_values_alone():
    recipe = Kivi(bits=2, key_bits=4)
    plan = recipe.layer_plan("*", 64, 64)
    assert (plan.keys.codec.bits, plan.values.codec.bits) == (4, 2)
    assert recipe.name == "kivi-k4v2"
    assert Kivi(bits=4, value_bits=4).name == "kivi-4bit"
    assert "kivi-k4v2 loses accuracy" in (recipe.warning(8, 1) or "")


def test_heads_that_do_not_fit():
    with pytest.raises(PlanError) as caught:
        Kivi(bits=2, group=32).layer_plan("a.b", 80, 80)
    assert str(caught.value) == (
        "The values of layer 'a.b' cannot be stored as int2.token32: "
        "group 32 does not divide head_dim 80."
    )
    with pytest.raises(PlanError) as caught:
        Kivi(bits=2).layer_plan("a.b", 20, 64)
    assert str(caught.value) == (
        "The keys of layer 'a.b' cannot be stored as int2.channel32: "
        "head_dim 20 at 2 bits does not fill whole 16-bit words."
    )


@pytest.mark.parametrize(("extra", "dim"), [({}, 64), ({"head_dim": 128}, 128)])
def test_plan_of_a_config(extra, dim):
    config = AutoConfig.for_model("llama", hidden_size=256, num_attention_heads=4, **extra)
    plan = recipe("kivi-2bit").plan(config)
    assert plan.layer("anything") == recipe("kivi-2bit").layer_plan("*", dim, dim)
    assert plan.layers == {}
    assert plan.recipe == "kivi-2bit"


def test_identity_recipe():
    assert Fp().layer_plan("*", 7, 9) == LayerPlan()
    assert LayerPlan().keys.codec == LayerPlan().values.codec == FP
    assert Fp().name == "fp"
