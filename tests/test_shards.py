"""Caches of which each of several processes holds a part of the sequence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpass
from examples import long_context_distributed
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.links import gathered
from kvpass.estimate.shapes import model_shape
from kvpass.format.shard import Shard
from kvpass.recipes import written_recipe
from tests import tolerances
from tests.models import prompt, tiny_model
from tests.once import made_once
from tests.shard_worker import PROMPT

ROOT = Path(__file__).parent.parent
CALIBRATED: dict[str, dict[str, Any]] = {
    "skvq-k2v2": {"group": 16},
    "kvquant-nuq3-1%": {},
    "kvmix": {"exact": "pivotal", "group": 8},
}
RECIPES = ["fp", "kivi-2bit", "rotated-4bit", *CALIBRATED]
CHUNKED = ["chunks", "padded chunks"]


def launch(folder: Path, ranks: int, *names: str) -> list[dict[str, Any]]:
    """What `tests.shard_worker` has found, by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "tests.shard_worker", str(folder), *names]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return findings(folder, ranks)


def findings(folder: Path, ranks: int) -> list[dict[str, Any]]:
    every = (folder / f"rank{rank}of{ranks}.json" for rank in range(ranks))
    return [json.loads(path.read_text()) for path in every]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def calibrate_and_launch(folder: Path) -> None:
        model = tiny_model("llama", layers=1)
        for name, fields in CALIBRATED.items():
            plan = kvpass.calibrate(model, name, [prompt(1, 200)], progress=False, **fields)
            plan.save(folder / f"{name}.safetensors")
        launch(folder, 2)

    return findings(made_once(tmp_path_factory, "shards", calibrate_and_launch), 2)


@pytest.mark.parametrize("run", [*RECIPES, *CHUNKED, "padded", "decoded"])
def test_ranks_together_are_a_process_alone(found, run):
    first, second = (rank[run] for rank in found)
    assert first["difference"] < tolerances.logits(torch.float32, run)
    assert first["stored"] == 0.0
    assert first["logits"] == second["logits"]
    assert first["graphs"] == second["graphs"] == first["alone"]["graphs"]
    assert first["kinds"] == ["ShardedChunkedKV" if run in CHUNKED else "ShardedKV"] * 2
    assert max(first["bytes"], second["bytes"]) < first["alone"]["bytes"]


@pytest.mark.parametrize("run", RECIPES)
def test_a_step_sends_as_much_for_any_context(found, run):
    for rank in found:
        prefill, step = rank[run]["sent"]
        # Of two sequences on two ranks: for each KV head, a number of a prompt; for each query head
        # an output, a sum, and, in the first layer, a number.
        assert (prefill, step) == (["(4, 2, 1, 1)"], ["(4, 4, 1, 18)"])


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("static", "A static cache cannot be sharded"),
        ("number", "shard=3 is not supported; allowed: an initialized process group"),
        ("mesh", "or a mesh of one dimension"),
        ("mesh of one dimension", "no error"),
        ("prompts", "The 2 ranks that share a cache do not read the same tokens"),
        ("tokens", "the same seed where they sample. 140"),
        ("different", "rank 1 'kivi-2bit' ("),
    ],
)
def test_what_ranks_are_told(found, case, told):
    assert [told in rank["refusals"][case] for rank in found] == [True, True]


def test_what_is_estimated_is_held_and_sent(found):
    shape = model_shape(tiny_model("llama", layers=1).config, torch.float32)
    recipe = written_recipe("kivi-2bit,residual=32")
    for rank in range(2):
        shard = Shard(rank, 2, "0")
        cache = ModelCache.packed(shape, recipe, torch.float32, shard)
        assert found[rank]["filled"]["bytes"] == cache.nbytes(1, PROMPT)
        # As `test_a_step_sends_as_much_for_any_context` has it, of two ranks.
        assert gathered(shape, 2, PROMPT, torch.float32, shard) == [4 * 4 * 4 * 18 // 2]


def test_a_cache_of_ranks_is_not_saved(found):
    told = "'layers.0.keys' is spread over 2 processes, which cannot be saved"
    assert [told in rank["filled"]["saved"] for rank in found] == [True, True]


def test_who_needs_all_of_a_cache_is_named(found):
    for rank in found:
        gathered = "is gathered from all 2 ranks whenever this graph runs"
        assert any(gathered in warning for warning in rank["decoded"]["warnings"])
        assert not any(gathered in warning for warning in rank["fp"]["warnings"])


def test_the_example_prints_what_ranks_hold(found):
    first, *ranks = found[0]["example"].split("\n")
    assert first == "603 tokens: 2,469,888 bytes as they are"
    assert [line.split(":")[0] for line in ranks] == ["rank 0", "rank 1"]
    assert all(line.endswith("the same tokens") for line in ranks)


def test_the_example_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="Start it with torchrun --nproc-per-node N"):
        long_context_distributed.main([])


def test_a_rank_that_is_lost(found):
    told = found[0]["lost"]
    assert "Rank 0 of the 2 that share this cache got no answer from the others" in told
    assert told.endswith(" 140"), "the step is undone"


def test_four_ranks(tmp_path):
    found = launch(tmp_path, 4, "kivi-2bit")
    for run in ("kivi-2bit", "heads apart"):
        first, *others = (rank[run] for rank in found)
        assert first["difference"] < tolerances.logits(torch.float32, "kivi-2bit")
        assert first["stored"] == 0.0
        assert {rank["logits"] for rank in others} == {first["logits"]}
