"""``torch.compile(options=...)``: what is allowed, and the sentence for everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpass
from kvpass.errors import KvpassError, OptionError, PlanError, unknown
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.options import Options, parse_options
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import DEFAULT, RECIPES, Fp, Kivi, recipe, written_recipe

RECIPE_NAMES = (
    "auto, cocktail, fp, kivi-2bit, kivi-4bit, kvmix, kvmix-k2.19v2.38, kvmix-k2.28v2.56, "
    "kvquant-nuq2, kvquant-nuq2-1%, kvquant-nuq3, kvquant-nuq3-1%, "
    "kvquant-nuq4, kvquant-nuq4-1%, rotated-2bit, rotated-4bit, rotated-k4v2, skvq-k2v1.5, "
    "skvq-k2v2"
)


def test_defaults():
    assert parse_options(None) == parse_options({}) == Options(recipe(DEFAULT), False, "inductor")
    assert DEFAULT in RECIPES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_by_name(name):
    assert parse_options({"recipe": name}).planner == recipe(name)
    assert recipe(name).name == name


def test_everything_at_once():
    options = {"recipe": "kivi-2bit", "group": 16, "residual": 64, "strict": True, "inner": "eager"}
    before = dict(options)
    expected = Kivi(bits=2, group=16, residual=64)
    assert parse_options(options) == Options(expected, True, "eager")
    assert options == before


def test_recipe_objects_and_plans():
    assert parse_options({"recipe": Kivi(bits=8), "residual": 32}).planner == Kivi(8, residual=32)
    assert parse_options({"recipe": Fp()}).planner == Fp()
    plan = Plan(LayerPlan(TensorPlan(Codec(2, "channel", 32), RetentionPolicy(0, 128))))
    assert parse_options({"recipe": plan, "strict": True}).planner is plan
    changed = parse_options({"recipe": plan, "window": 64, "sinks": 4}).planner
    assert changed == plan.with_(window=64, sinks=4)
    assert changed.default.keys.retention == RetentionPolicy(64, 128, 4)


FIELDS = (
    "before_rope, bits, group, inner, key_bits, mode, recipe, residual, shard, strict, value_bits"
)
KNOWN = f"Allowed: {FIELDS}."
REFUSED = [
    (
        {"recipe": "kivi-3bit"},
        "Unknown recipe 'kivi-3bit'. Did you mean 'kivi-4bit' or 'kivi-2bit'? "
        "Allowed: " + RECIPE_NAMES + ".",
    ),
    (
        {"recipe": "zz"},
        "Unknown recipe 'zz'. Allowed: " + RECIPE_NAMES + ".",
    ),
    (
        {"recipe": 3},
        "recipe=3 is not supported; allowed: a Recipe, a Plan, the path of a plan's *.safetensors "
        "file, or one of " + RECIPE_NAMES + ".",
    ),
    ({"grup": 32}, f"Unknown option 'grup'. Did you mean 'group'? {KNOWN}"),
    ({"zz": 1}, f"Unknown option 'zz'. {KNOWN}"),
    (
        {"recipe": "fp", "bits": 2},
        "Unknown option 'bits'. Allowed: before_rope, inner, mode, recipe, shard, strict.",
    ),
    ({"strict": 1}, "strict=1 is not supported; allowed: True, False."),
    (
        {"inner": "inducter"},
        "Unknown inner compiler 'inducter'. Did you mean 'inductor'? Allowed: eager, inductor.",
    ),
    (
        {"recipe": Plan(), "bits": 2, "group": 8},
        "A Plan is made for what it says of bits, group: make another one, or calibrate again; "
        "allowed with a Plan: window, sinks, qnorm, inner, mode, shard, strict.",
    ),
    (
        {"recipe": Plan(), "sinks": -1},
        "sinks=-1 is not supported; allowed: a whole number, at least 0.",
    ),
    ({"recipe": Plan(), "qnorm": 1}, "qnorm=1 is not supported; allowed: None, True, False."),
    ({"key_bits": 3}, "key_bits=3 is not supported; allowed: 2, 4, 8 (or the recipe 'fp')."),
    ({"bits": 3}, "bits=3 is not supported; allowed: 2, 4, 8 (or the recipe 'fp')."),
    ({"bits": "2"}, "bits='2' is not supported; allowed: 2, 4, 8 (or the recipe 'fp')."),
    ({"group": 1}, "group=1 is not supported; allowed: a whole number, at least 2."),
    ({"group": 2.5}, "group=2.5 is not supported; allowed: a whole number, at least 2."),
    ({"residual": 0}, "residual=0 is not supported; allowed: a whole number, at least 1."),
    (
        {"residual": torch.tensor([32, 64])},
        "residual=tensor([32, 64]) is not supported; allowed: numbers, texts, True, False, None, "
        "and tuples of them.",
    ),
    (
        {"bits": "2" * 999},
        f"bits='{'2' * 76}... is not supported; allowed: 2, 4, 8 (or the recipe 'fp').",
    ),
    ({"z" * 999: 1}, f"Unknown option '{'z' * 76}.... {KNOWN}"),
    ({"mode": 3}, "mode=3 is not supported; allowed: a mode of Inductor."),
    ({"strict": torch.ones(2)}, "strict=tensor([1., 1.]) is not supported; allowed: True, False."),
    ({"residual": None}, "residual=None is not supported; allowed: a whole number, at least 1."),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(o)[:40] for o, _ in REFUSED])
def test_refusals(options, message):
    with pytest.raises(OptionError) as caught:
        parse_options(options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_a_group_that_does_not_divide_the_residual():
    with pytest.raises(PlanError) as caught:
        parse_options({"group": 24})
    assert str(caught.value) == (
        "group 24 of int4.channel24 does not divide the residual of 128 tokens "
        "that are packed at a time."
    )


@pytest.mark.parametrize("bits", [2.0, 4.0])
def test_bits_are_whole_numbers(bits):
    with pytest.raises(OptionError):
        parse_options({"bits": bits})


def test_unknown_field_of_a_recipe():
    with pytest.raises(OptionError) as caught:
        recipe("kivi-2bit", bitts=2)
    assert str(caught.value) == (
        "Unknown option of recipe 'kivi-2bit': 'bitts'. Did you mean 'bits' or 'key_bits' or "
        "'value_bits'? Allowed: before_rope, bits, group, key_bits, residual, value_bits."
    )
    with pytest.raises(OptionError) as caught:
        recipe("fp", bits=2)
    assert str(caught.value) == "Unknown option of recipe 'fp': 'bits'. Allowed: before_rope."


def test_sentence_names_at_most_three_close_names():
    assert unknown("thing", "aaaa", ["aaab", "aaac", "aaad", "aaae", "zzzz"]) == (
        "Unknown thing 'aaaa'. Did you mean 'aaae' or 'aaad' or 'aaac'? "
        "Allowed: aaab, aaac, aaad, aaae, zzzz."
    )
    assert issubclass(OptionError, KvpassError)


def test_recipes_of_a_command_line():
    assert written_recipe("fp") == Fp()
    assert written_recipe("kivi-2bit,group=128") == Kivi(bits=2, group=128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivi", "Unknown recipe 'kivi'"),
        ("kivi-2bit,group", "Recipe 'kivi-2bit,group' cannot be read"),
        ("kivi-2bit,grup=4", "Did you mean 'group'"),
        ("kivi-2bit,group=1", "group=1 is not supported"),
        ("kivi-2bit,group=x", "group='x' is not supported"),
        ("kivi-2bit,bits=-2", "bits=-2 is not supported"),
    ],
)
def test_recipes_that_a_command_line_may_not_name(text, message):
    with pytest.raises(OptionError, match=message):
        written_recipe(text)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("skvq-k2v1.5", {"slots": True}, {"ternary_in_2bit": True}),
        ("cocktail", {"levels": (2, 4, 16)}, {"bits": (2, 4, 16)}),
    ],
)
def test_former_names_of_options_warn(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    (word,) = old
    with pytest.warns(FutureWarning, match=f"option '{word}' of recipe '{name}' is called"):
        assert recipe(name, **old) == recipe(name, **new)
    with pytest.warns(FutureWarning, match=f"option '{word}'"):
        assert parse_options({"recipe": name, **old}).planner == recipe(name, **new)


def test_former_public_names_warn() -> None:
    with pytest.warns(FutureWarning, match="Residency is called kvpass.RetentionPolicy now"):
        assert kvpass.Residency is RetentionPolicy
