"""`kvpass bench decode --peers`, without the packages of any peer."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpass.bench import peers
from kvpass.bench.filling import Setting, step
from kvpass.bench.models import Shape, random_model
from kvpass.bench.peer_llama_cpp import interleaved, stored_tensor
from kvpass.bench.peer_openvino import Stateless
from kvpass.bench.peers import PEERS, Peer, check_peers, peer_contenders
from kvpass.bench.timing import measure
from kvpass.cli import main
from kvpass.errors import OptionError
from tests.command import failure

CPU = torch.device("cpu")
CONFIG = Shape(2, 64, 96, 4, 2, None, 128).config()
SETTING = Setting(CONFIG, 20, 1, torch.float32, CPU, "prompt", "eager")


def results(names, folder, setting=SETTING):
    model = random_model(setting.config, setting.dtype, setting.device)
    return measure(peer_contenders(names, setting, model, 30, folder), 2, CPU)


def test_missing_packages_are_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    rows = results(list(PEERS), tmp_path)
    assert [r.name for r in rows] == [
        "llama.cpp, f16",
        "llama.cpp, f16, flash attention",
        "llama.cpp, q8_0",
        "llama.cpp, q4_0",
        "openvino, f16",
        "openvino, u8",
        "openvino, u4",
    ]
    install = "pip install 'kvpass[peers]'."
    needed = {"llama.cpp": "llama-cpp-python and gguf", "openvino": "openvino"}
    for row in rows:
        name = row.name.split(",")[0]
        assert row.problem == f"ImportError: {name} needs {needed[name]}: {install}"
        assert row.times_ms == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 2}, "OptionError: Peers are measured on the CPU and with batch 1 only."),
        (
            {"config": MistralConfig(sliding_window=None, num_hidden_layers=1, vocab_size=100)},
            "OptionError: Peers are measured with Llamas only, not with 'mistral'.",
        ),
    ],
)
def test_what_is_not_measured_is_a_row(change, message, monkeypatch, tmp_path):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: "found")
    contenders = peer_contenders(list(PEERS), replace(SETTING, **change), None, 30, tmp_path)
    assert {r.problem for r in measure(contenders, 2, CPU)} == {message}


def test_mistakes(capsys):
    with pytest.raises(OptionError, match=r"Unknown peer 'llama'. Did you mean 'llama.cpp'"):
        check_peers(["llama"], SETTING)
    command = ["bench", "decode", "--device", "cpu", "--peers"]
    assert "Unknown peer 'vllm'. Allowed: llama.cpp, openvino." in failure(
        capsys, *command, "vllm", "--fill", "prompt"
    )
    assert "fill='random' is not supported with peers" in failure(capsys, *command, "openvino")
    check_peers([], replace(SETTING, fill="random"))
    assert main(["bench", "decode", "--help"]) == 0


def fake_peer(forgets=0, scale=1.0):
    """transformers itself: it forgets so many tokens, and spoils the logits of models that have
    more than one layer."""

    def write(setting, model, folder):
        torch.save(model, folder / "model.pt")
        return folder / "model.pt"

    def start(path, setting, cache, room):
        model, held = torch.load(path, weights_only=False), DynamicCache(config=setting.config)

        @torch.no_grad()
        def decode(ids):
            logits = step(model, ids, held)
            for layer in held.layers if ids.shape[1] > 1 else ():
                layer.keys, layer.values = (
                    x[:, :, : x.shape[2] - forgets] for x in (layer.keys, layer.values)
                )
            return logits * (scale if setting.shape.layers > 1 else 1)

        return decode

    return Peer({"torch": "torch"}, {"f16": 16, "q4": 4}, 1, write, start)


def test_every_kind_of_cache_is_checked_and_timed(monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", fake_peer())
    whole, first = results(["fake"], tmp_path)
    for row in (whole, first):
        assert row.error < 1e-5
        assert len(row.times_ms) == 2
        assert f"torch {version('torch')}, prefill" in row.note
    assert "first layer" not in whole.note
    assert "checked on its first layer (all layers: " in first.note


def test_rounded_caches_may_be_off_behind_all_layers_only(monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", fake_peer(scale=2.0))
    whole, first = results(["fake"], tmp_path)
    assert whole.wrong
    assert whole.times_ms == ()
    assert first.error < 1e-5
    assert "(all layers: 1.0e+00)" in first.note


@pytest.mark.parametrize("peer", [fake_peer(forgets=8), fake_peer(scale=float("nan"))])
def test_wrong_peers_are_not_timed(peer, monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", peer)
    for row in results(["fake"], tmp_path):
        assert row.wrong
        assert row.times_ms == ()


def rope_of_neighbours(x, cos, sin):
    """RoPE as llama.cpp computes it: channels ``2 i`` and ``2 i + 1`` are a pair."""
    even, odd = x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def test_rows_in_the_order_of_llama_cpp():
    """Scores behind either kind of RoPE are the same."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=16)
    torch.manual_seed(0)
    x, positions = torch.randn(1, 7, 32), torch.arange(7)[None]
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)

    def projected(parameters):
        weight, bias = parameters
        return torch.nn.functional.linear(x, weight, bias).view(1, 7, -1, 16).transpose(1, 2)

    def scores(q, k):
        return q @ k.repeat_interleave(2, 1).transpose(2, 3)

    q, k = ((torch.randn(16 * heads, 32), torch.randn(16 * heads)) for heads in (4, 2))
    moved = [
        tuple(stored_tensor(f"self_attn.{name}.weight", x, 4, 2) for x in pair)
        for name, pair in (("q_proj", q), ("k_proj", k))
    ]
    expected = scores(*apply_rotary_pos_emb(projected(q), projected(k), cos, sin))
    found = scores(*(rope_of_neighbours(projected(p), cos[:, None], sin[:, None]) for p in moved))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tensors_of_the_file():
    weight, norm = torch.randn(32, 64).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(stored_tensor("l.v_proj.weight", weight, 4, 2), weight)
    assert torch.equal(stored_tensor("l.q_proj.weight", weight, 4, 2), interleaved(weight, 4))
    assert torch.equal(stored_tensor("l.k_proj.weight", weight, 4, 2), interleaved(weight, 2))
    assert stored_tensor("model.norm.weight", norm, 4, 2).dtype == torch.float32


@torch.no_grad()
def test_keys_and_values_as_inputs_and_outputs():
    """The module that OpenVINO converts computes what the model does with a cache."""
    model = random_model(CONFIG, torch.float32, CPU)
    cache = DynamicCache(config=CONFIG)
    step(model, SETTING.ids(9), cache)
    past = [x.clone() for layer in cache.layers for x in (layer.keys, layer.values)]
    logits, *held = Stateless(model)(SETTING.ids(3), torch.zeros(1, dtype=torch.int32), *past)
    assert torch.equal(logits, step(model, SETTING.ids(3), cache))
    for found, layer in zip(held[::2], cache.layers, strict=True):
        assert torch.equal(found, layer.keys)
    assert held[1].shape == (1, 2, 12, 16)
