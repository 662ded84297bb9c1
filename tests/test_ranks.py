"""Models that transformers spreads over two processes: each packs its own KV heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpass import ChannelOrder
from kvpass.errors import PlanError
from kvpass.fingerprint import fingerprint
from kvpass.format.parse import parse_plan
from kvpass.format.ranks import Ranks
from kvpass.plan import Calibration, LayerPlan, Plan
from tests import tolerances
from tests.bases import paired, rotation
from tests.models import tiny_model
from tests.once import made_once
from tests.rank_worker import RECIPES

ROOT = Path(__file__).parent.parent
HEADS, DIM = 4, 16
RETENTION = "window=32,pack_every=1"
LAYERS = ["model.layers.0.self_attn"]


def layer_plan() -> LayerPlan:
    """Every head has an order of its own, a rotation and factors of clipping."""
    generator = torch.Generator().manual_seed(0)
    order = ChannelOrder.of(paired(HEADS, DIM, generator, DIM))
    clip = ",".join(f"{0.99 - i / 50:.2f}" for i in range(2 * HEADS))
    keys = parse_plan(f"int4.token8.fp8.clip{clip}/{RETENTION}")
    values = parse_plan(f"int4.token16.fp8/{RETENTION}")
    return LayerPlan(keys, values, order, rotation(HEADS, DIM, generator))


def save_plans(model: Any, folder: Path) -> None:
    known = Calibration(0, 1, fingerprint(model, LAYERS), {})
    plan = Plan(layers=dict.fromkeys(LAYERS, layer_plan()), recipe="own", calibration=known)
    plan.save(folder / "plan.safetensors")
    spanning = LayerPlan(values=parse_plan(f"int4.token64/{RETENTION}"))
    replace(plan, layers=dict.fromkeys(LAYERS, spanning)).save(folder / "spanning.safetensors")
    weights = {name: tuple(x + 1 for x in values) for name, values in known.weights.items()}
    other = replace(plan, calibration=replace(known, weights=weights))
    other.save(folder / "other.safetensors")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `tests.rank_worker` has found, by rank."""
    folder = made_once(tmp_path_factory, "ranks", launch)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def launch(folder: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": HEADS, "hidden_size": 128}
    model = tiny_model("qwen2", layers=len(LAYERS), **sizes)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_(generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder / "model")
    save_plans(model, folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.rank_worker", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("recipe", [*RECIPES, "plan"])
def test_each_rank_packs_its_heads(found, recipe):
    name = "fp" if recipe == "fp" else "kivi-2bit"
    for rank in found:
        alone, shared = rank[recipe]["alone"], rank[recipe]["shared"]
        assert rank[recipe]["difference"] < tolerances.logits(torch.float32, name)
        assert (alone["heads"], shared["heads"]) == (HEADS, HEADS // 2)
        # Each of two tensors counts the tokens of its 1 to 3 segments on each rank, in 4 bytes.
        assert shared["bytes"] - alone["bytes"] / 2 in (4, 8, 12)
        assert (shared["graphs"], shared["breaks"]) == (alone["graphs"], 0)


@pytest.mark.parametrize("recipe", [*RECIPES, "plan"])
def test_rules_as_in_one_process(found, recipe):
    for rank in found:
        shared, alone = (rank[recipe][n]["events"] for n in ("shared", "alone"))
        assert [event[:2] for event in shared] == [event[:2] for event in alone]


def test_bases_fold_into_shards(found):
    for rank in found:
        shared, alone = (
            [event for event in rank["plan"][name]["events"] if event[0] == "push_basis"]
            for name in ("shared", "alone")
        )
        assert shared == alone
        assert ["push_basis", True, "through transpose, reshape, linear"] in shared


def test_own_heads_of_a_plan():
    ranks, plan = Ranks(1, (4, 6)), layer_plan()
    own = plan.of_rank(ranks, DIM, DIM, 2)
    assert torch.equal(own.key_basis.tensor(), plan.key_basis.tensor()[2:])
    assert torch.equal(own.value_basis.tensor(), plan.value_basis.tensor()[2:])
    assert own.keys.codec.clip == plan.keys.codec.clip[4:]
    assert plan.of_rank(ranks, DIM, DIM, HEADS) == plan
    with pytest.raises(PlanError, match="for 4 heads of 16 channels, the model has 3 heads of 16"):
        plan.of_rank(ranks, DIM, DIM, 3).check("0", DIM, DIM, 3)


def test_groups_of_several_ranks(found):
    for rank in found:
        assert "group 64 spans 4 heads of 16, which 2 do not fill" in rank["spanning"]
        assert "Each of 2 ranks stores its own 2 KV heads" in rank["spanning"]


def test_plan_of_other_weights(found):
    assert ["other values" in rank["other"] for rank in found] == [True, True]


def test_ranks_with_different_recipes(found):
    for rank in found:
        assert "rank 0 'kivi-2bit' (" in rank["different"]
        assert "rank 1 'kivi-4bit' (" in rank["different"]


def test_a_rank_that_does_not_compile(found):
    assert "Rank 1 of a tensor-parallel model has not compiled it with kvpass" in found[0]["alone"]


@pytest.mark.parametrize("purpose", ["calibrate", "inplace"])
def test_what_needs_a_whole_model(found, purpose):
    assert ["needs a whole model" in rank[purpose] for rank in found] == [True, True]
