"""KVmix's importance against one backward pass for each layer, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpass
from examples.quickstart import SMALL_MODEL
from kvpass.calibration.importance import rank_correlations
from kvpass.calibration.samples import STORED
from kvpass.cli import main
from kvpass.errors import OptionError
from tests.models import prompt, tiny_model

TEXTS = [prompt(1, 30, seed=i)[0] for i in range(3)]


def weight_and_rows(family: str, layer: int, kind: str, model: Any) -> tuple[Tensor, slice, int]:
    """The weight, which part of it along which dimension, from the model's own code."""
    if family == "gpt2":
        part = {"keys": slice(64, 128), "values": slice(128, 192)}[kind]
        return model.transformer.h[layer].attn.c_attn.weight, part, 1
    attention = model.model.layers[layer].self_attn
    if family == "phi3":
        q, kv = 64, 32
        part = slice(q, q + kv) if kind == "keys" else slice(q + kv, q + 2 * kv)
        return attention.qkv_proj.weight, part, 0
    weight = attention.k_proj.weight if kind == "keys" else attention.v_proj.weight
    return weight, slice(None), 0


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_is_that_of_autograd(family: str) -> None:
    model = tiny_model(family)
    found = kvpass.importance(model, TEXTS, progress=False)
    assert len(found) == 2
    for layer, score in enumerate(found.values()):
        for kind in ("keys", "values"):
            weight, part, dim = weight_and_rows(family, layer, kind, model)
            norms = []
            for ids in TEXTS:
                ids = ids.unsqueeze(0)
                (gradient,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [weight])
                gradient = gradient[part] if dim == 0 else gradient[:, part]
                norms.append(float(gradient.norm()))
            assert getattr(score, kind) == pytest.approx(sum(norms) / len(norms), rel=1e-5)


def test_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    frozen = model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    kept = model.lm_head.weight
    kept.grad = torch.ones_like(kept)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    kvpass.importance(model, TEXTS, progress=False)
    assert not frozen.requires_grad
    assert model.model.layers[1].self_attn.k_proj.weight.requires_grad
    assert torch.equal(kept.grad, torch.ones_like(kept))
    assert all(p.grad is None for p in model.parameters() if p is not kept)
    for name, module in model.named_modules():
        # torch.compile leaves its mark on what it wraps.
        assert module.__dict__.keys() - {"_is_torch_compile"} == before[name].keys(), name
        assert module.training is before[name]["training"]


def test_activations_are_not_kept() -> None:
    """With eight layers, the backward pass needs little more memory than with two."""
    peaks = []
    for layers in (2, 8):
        model = tiny_model("llama", layers=layers)
        held: list[int] = []

        def pack(x: Tensor, held: list[int] = held) -> Tensor:
            held.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kvpass.importance(model, TEXTS[:1], progress=False)
        # What is computed anew is saved again, layer by layer.
        peaks.append(sum(held) / layers)
    assert peaks[1] < 1.5 * peaks[0]


def test_a_compiled_model_is_refused() -> None:
    model = tiny_model("llama")
    model.compile(backend="eager")
    with pytest.raises(OptionError, match="compiled already"):
        kvpass.importance(model, TEXTS, progress=False)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A cache of keys and values, in few bits. " * 20, encoding="utf-8")
    out, plot = tmp_path / "found.json", tmp_path / "found.svg"
    files = ["--json", str(out), "--plot", str(plot), "--sets", "2"]
    assert main(["profile", str(SMALL_MODEL), str(text), "--length", "64", *files]) == 0
    header, *rows, ranks = capsys.readouterr().out.splitlines()
    assert header.split() == ["layer", "keys", "values"]
    assert [row.split()[0] for row in rows] == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert all(float(number) > 0 for row in rows for number in row.split()[1:])
    assert ranks.startswith("rank correlation of 2 sets of texts: keys ")
    assert len(json.loads(out.read_text(encoding="utf-8"))["results"]) == 4
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_ranks_of_disjoint_sets_are_compared() -> None:
    # Of four texts, layers a, b, c; the sets are texts 0 and 2, texts 1 and 3.
    a, b, c = [1.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 3.0, 2.5]
    norms = {(layer, kind): x for kind in STORED for layer, x in zip("abc", (a, b, c), strict=True)}
    found = rank_correlations(norms, 2)
    # Means 1, 2, 3 and 3, 2, 1.75: one order, and the other way round.
    assert found == {"keys": -1.0, "values": -1.0}
    assert rank_correlations({k: x * 2 for k, x in norms.items()}, 4)["keys"] == -0.25
    with pytest.raises(OptionError, match="sets=5 is not supported; allowed: 2 to 4, the texts"):
        rank_correlations(norms, 5)


@pytest.mark.parametrize(("arguments", "match"), [
    (["nowhere", __file__], "'nowhere' is not a model folder"),
    ([str(SMALL_MODEL), "nowhere.txt"], "Text file 'nowhere.txt' does not exist"),
    ([str(SMALL_MODEL), __file__, "--dtype", "int8"], "'--dtype': 'int8' is not one of"),
    ([str(SMALL_MODEL), __file__, "--samples", "0"], "samples=0 is not supported"),
    ([str(SMALL_MODEL), __file__, "--plot", "nowhere/x.svg"], "its folder does not exist"),
])  # fmt: skip
def test_bad_arguments_of_the_command(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments]) == 2
    # Behind what loading a model prints.
    assert match in capsys.readouterr().err
