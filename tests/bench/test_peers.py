"""`kvpass bench decode --peers`, without the packages of any peer."""

from __future__ import annotations

import struct
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvpass.bench import peers
from kvpass.bench.filling import Setting, step
from kvpass.bench.models import Shape, random_model
from kvpass.bench.peer_llama_cpp import (
    behind_hadamard,
    interleaved,
    stored_state,
    stored_tensor,
)
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
        check_peers(["llama"])
    command = ["bench", "decode", "--device", "cpu", "--peers"]
    assert "Unknown peer 'vllm'. Allowed: llama.cpp, openvino." in failure(capsys, *command, "vllm")
    assert main(["bench", "decode", "--help"]) == 0


class Transformers:
    """A runtime that forgets so many tokens of what its cache begins with, and spoils the logits of
    models that have more than one layer."""

    def __init__(self, path, setting, forgets, scale):
        self.model, self.setting = torch.load(path, weights_only=False), setting
        self.cache, self.forgets = DynamicCache(config=setting.config), forgets
        self.scale = scale if setting.shape.layers > 1 else 1

    @torch.no_grad()
    def decode(self, ids):
        logits = step(self.model, ids, self.cache)
        if ids.shape[1] > 1:
            self.fill(self.cache)
        return logits * self.scale

    def fill(self, cache):
        self.cache = cache
        for layer in cache.layers:
            layer.keys, layer.values = (
                x[:, :, : x.shape[2] - self.forgets] for x in (layer.keys, layer.values)
            )


def fake_peer(forgets=0, scale=1.0):
    """transformers itself, as a peer."""

    def write(setting, model, folder):
        torch.save(model, folder / "model.pt")
        return folder / "model.pt"

    def start(path, setting, cache, room):
        return Transformers(path, setting, forgets, scale)

    return Peer({"torch": "torch"}, {"f16": 16, "q4": 4}, 1, write, start)


@pytest.mark.parametrize("fill", ["prompt", "random"])
def test_every_kind_of_cache_is_checked_and_timed(fill, monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", fake_peer())
    whole, first = results(["fake"], tmp_path, replace(SETTING, fill=fill))
    for row in (whole, first):
        assert row.error < 1e-5
        assert len(row.times_ms) == 2
        assert f"torch {version('torch')}" in row.note
        assert ("prefill" in row.note) == (fill == "prompt")
    assert "first layer" not in whole.note
    assert "checked on its first layer (all layers: " in first.note


def test_rounded_caches_may_be_off_behind_all_layers_only(monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", fake_peer(scale=2.0))
    whole, first = results(["fake"], tmp_path)
    assert whole.wrong
    assert whole.times_ms == ()
    assert first.error < 1e-5
    assert "(all layers: 1.0e+00)" in first.note


@pytest.mark.parametrize("fill", ["prompt", "random"])
@pytest.mark.parametrize("peer", [fake_peer(forgets=8), fake_peer(scale=float("nan"))])
def test_wrong_peers_are_not_timed(peer, fill, monkeypatch, tmp_path):
    monkeypatch.setitem(PEERS, "fake", peer)
    for row in results(["fake"], tmp_path, replace(SETTING, fill=fill)):
        assert row.wrong
        assert row.times_ms == ()


def rope_of_neighbours(x, cos, sin):
    """RoPE as llama.cpp computes it: channels ``2 i`` and ``2 i + 1`` are a pair."""
    even, odd = x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def states_in_both_orders():
    """Queries and keys ``[1, H, T, D]`` of transformers, and from the stored weights, of
    llama.cpp."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=16)
    torch.manual_seed(0)
    x, positions = torch.randn(1, 7, 32), torch.arange(7)[None]
    cos, sin = LlamaRotaryEmbedding(config)(x, positions)

    def projected(parameters):
        weight, bias = parameters
        return torch.nn.functional.linear(x, weight, bias).view(1, 7, -1, 16).transpose(1, 2)

    q, k = ((torch.randn(16 * heads, 32), torch.randn(16 * heads)) for heads in (4, 2))
    moved = [
        tuple(stored_tensor(f"self_attn.{name}.weight", x, 4, 2) for x in pair)
        for name, pair in (("q_proj", q), ("k_proj", k))
    ]
    return apply_rotary_pos_emb(projected(q), projected(k), cos, sin), [
        rope_of_neighbours(projected(p), cos[:, None], sin[:, None]) for p in moved
    ]


def test_rows_in_the_order_of_llama_cpp():
    """Scores behind either kind of RoPE are the same."""

    def scores(q, k):
        return q @ k.repeat_interleave(2, 1).transpose(2, 3)

    ours, theirs = states_in_both_orders()
    torch.testing.assert_close(scores(*theirs), scores(*ours), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flash", [True, False])
def test_caches_as_llama_cpp_saves_them(flash):
    """A cache of transformers is stored with the keys that llama.cpp computes."""
    (_, keys), (_, expected) = states_in_both_orders()
    values = torch.randn(1, 2, 7, 16)
    cache = DynamicCache()
    for i in (1, -1):
        cache.update(i * keys, i * values, len(cache.layers))
    state = b"".join(stored_state(cache, 1, lambda x: x.half().numpy().tobytes(), flash, False))
    count, *places = struct.unpack_from("<22I", state)
    assert (count, places) == (7, [x for i in range(7) for x in (i, 1, 0)])
    assert struct.unpack_from("<II", state, 88) == (not flash, 2)
    at, size = 96, 7 * 32 * 2

    def stored(head):
        nonlocal at
        data = torch.frombuffer(bytearray(state[at + head : at + head + size]), dtype=torch.half)
        at += head + size
        return data.float()

    for i in (1, -1):
        assert struct.unpack_from("<iQ", state, at) == (1, 64)
        found = stored(12).view(1, 7, 2, 16).transpose(1, 2)
        torch.testing.assert_close(found, i * expected, rtol=1e-3, atol=1e-3)
    for i in (1, -1):
        header = ("<iQ", (1, 64)) if flash else ("<iII", (1, 2, 32))
        assert struct.unpack_from(header[0], state, at) == header[1]
        found = stored(12)
        found = found.view(7, 2, 16).transpose(0, 1) if flash else found.view(2, 16, 7).mT
        torch.testing.assert_close(found[None], i * values, rtol=1e-3, atol=1e-3)
    assert at == len(state)


@pytest.mark.parametrize(("dim", "most", "block"), [(128, 128, 128), (128, 64, 64), (192, 192, 64)])
def test_quantized_caches_of_llama_cpp_are_behind_hadamard_matrices(dim, most, block):
    x = torch.randn(5, 2 * dim)
    turned = behind_hadamard(x, dim, most)
    torch.testing.assert_close(behind_hadamard(turned, dim, most), x)
    spike = behind_hadamard(torch.eye(1, 2 * dim), dim, most)[0]
    torch.testing.assert_close(spike[:block], torch.full((block,), block**-0.5))
    assert not spike[block:].any()
    assert behind_hadamard(x, 96, 96) is x


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
