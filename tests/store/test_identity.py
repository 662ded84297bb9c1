"""The identity of a model: the same for the same, however it is compiled; another for another."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass import ChannelOrder, LayerPlan, Plan, recipe
from kvpass.store.identity import Identity
from tests.models import tiny_model

MODEL = tiny_model("llama", layers=1)


def identity(planner: Any, **options: Any) -> Identity:
    twin = copy.deepcopy(MODEL)
    twin.compile(backend="kvpass", options={"recipe": planner, **options})
    return Identity.of(twin)


def test_ways_to_compile() -> None:
    wanted = identity("kivi-2bit")
    assert (wanted.dtype, wanted.recipe) == ("float32", "kivi-2bit")
    assert identity(recipe("kivi-2bit"), inner="eager") == wanted
    twin = copy.deepcopy(MODEL)
    plain = Identity.of(twin)
    assert plain == replace(wanted, recipe=None, plan=None)
    options = {"recipe": "kivi-2bit"}
    twin.forward = torch.compile(twin.forward, backend="kvpass", options=options)
    assert Identity.of(twin) == wanted
    twin.forward = torch.compile(MODEL.forward, backend="eager")
    assert Identity.of(twin) == plain
    # A model within another, as an adapter has it.
    twin = copy.deepcopy(MODEL)
    twin.model.compile(backend="kvpass")
    assert Identity.of(twin).recipe == "kivi-4bit"
    assert identity("kivi-2bit", residual=64).plan != wanted.plan


def test_plans(tmp_path: Path) -> None:
    order = ChannelOrder.of(torch.arange(16).flip(0).expand(2, 16).contiguous())
    layer = recipe("kivi-2bit").plan(MODEL.config).default
    plans = [Plan(layer), Plan(layer, {"0": LayerPlan()}), Plan(replace(layer, value_basis=order))]
    found = [identity(plan).plan for plan in plans]
    assert len(set(found)) == 3
    for plan, digest in zip(plans, found, strict=True):
        plan.save(tmp_path / "plan.safetensors")
        assert identity(str(tmp_path / "plan.safetensors")).plan == digest


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_weights(name: str) -> None:
    other = copy.deepcopy(MODEL)
    with torch.no_grad():
        other.get_parameter(name).mul_(1.01)
    assert Identity.of(other).model != Identity.of(MODEL).model
    other.config._name_or_path = "elsewhere"
    other.load_state_dict(MODEL.state_dict())
    assert Identity.of(other) == Identity.of(MODEL)
    other.config.rms_norm_eps *= 2
    assert Identity.of(other).model != Identity.of(MODEL).model
