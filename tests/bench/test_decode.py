"""`kvpass bench decode` on a tiny model."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import cache_utils

from kvpass.bench import decoders
from kvpass.bench.decode import COPY_NAME, bench_decode, decode_json, decode_section
from kvpass.bench.filling import Setting, decoded_cache, packed_cache
from kvpass.bench.models import Shape, model_bytes
from kvpass.bench.timing import measure
from kvpass.errors import OptionError
from kvpass.recipes import recipe

CONFIG = Shape(2, 64, 96, 4, 2, None, 128).config()


def setting(**options):
    options = {"context": 300, "fill": "random", "inner": "eager"} | options
    context = options.pop("context")
    return Setting(CONFIG, context, 2, torch.float32, torch.device("cpu"), **options)


@pytest.mark.parametrize("fill", ["random", "prompt"])
def test_all_contenders_are_right(monkeypatch, fill):
    chosen = setting(fill=fill)
    caches = []
    make = decoders.StaticCache
    monkeypatch.setattr(decoders, "StaticCache", lambda **o: caches.append(make(**o)) or caches[-1])
    # A prefill has no chunk bits.
    one = "kivi-4bit" if fill == "prompt" else "rotated-4bit,key_rotation=hadamard"
    other = "skvq-k2v2,group=4" if fill == "prompt" else "cocktail"
    results = bench_decode(chosen, [one, other], 2)
    assert [r.name for r in results[:5]] == [
        f"kvpass {one}",
        f"kvpass {other}",
        "eager, DynamicCache",
        "compile, DynamicCache",
        "compile, StaticCache",
    ]
    for result in results[:5]:
        assert not result.problem
        assert result.error < 1e-4
        assert len(result.times_ms) == 2
    # A step that is checked, three to warm up, and two turns of two.
    assert caches[-1].get_seq_length() == 300 + 1 + 3 + 4
    # What is not read of the embeddings is not copied: the vocabulary has 128 tokens.
    copied = results[-1]
    assert copied.name == COPY_NAME
    assert copied.bytes_read == model_bytes(CONFIG, torch.float32) - 128 * 64 * 4
    assert len(copied.times_ms) == 2
    steps = {
        "prompt": r"append by \w+ x4, attention by \w+ x2",
        "random": "append_attention by cpp",
    }
    assert re.search(steps[fill], results[0].note)
    assert ("prefill" in results[0].note) == (fill == "prompt")
    table = str(decode_section(chosen, results))
    assert f"300 tokens ({fill}), batch 2, 2 layers" in table
    # What takes least is no peer.
    assert f"x {COPY_NAME}" not in table
    assert "tokens/s" in table
    speed = decode_json(chosen, results)[0]["tokens_per_s"]
    assert speed == pytest.approx(2000 / results[0].median_ms)


def test_a_wrong_cache_is_caught(monkeypatch):
    """The keys of the packed cache are in another order than their values."""
    real = packed_cache

    def shuffled(setting, plan):
        cache = real(setting, plan)
        for layer in cache.layers:
            layer.keys.codes.copy_(layer.keys.codes.flip(2))
        return cache

    monkeypatch.setattr(decoders, "packed_cache", shuffled)
    right = real(setting(), recipe("kivi-4bit").layer_plan("*", 16, 16))
    monkeypatch.setattr(decoders, "decoded_cache", lambda s, cache: decoded_cache(s, right))
    wrong, *_ = bench_decode(setting(), ["kivi-4bit"], 1)
    assert wrong.wrong
    assert wrong.error > 0.2
    assert wrong.times_ms == ()
    assert "WRONG" in str(decode_section(setting(), [wrong]))


def test_quantized_caches_of_transformers(monkeypatch):
    """Without their libraries a row says so."""
    for library in ("optimum_quanto", "hqq"):
        monkeypatch.setattr(cache_utils, f"is_{library}_available", lambda: False)
    peers = decoders.plain_contenders(setting(), None, 310)
    quantized = [peer for peer in peers if "QuantizedCache" in peer.name]
    results = measure(quantized, 1, torch.device("cpu"))
    for result, library in zip(results, ("optimum-quanto", "`HQQ`"), strict=True):
        assert result.problem.startswith(f"ImportError: You need to install {library} ")
        assert result.times_ms == ()


def test_contenders_have_code_objects_of_their_own():
    a, b = decoders.new_step("a"), decoders.new_step("b")
    assert a.__code__ is not b.__code__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context=0 is not supported; at least 1"),
        ({"fill": "rand"}, "Unknown fill 'rand'. Did you mean 'random'"),
        ({"inner": "inductr"}, "Unknown inner compiler 'inductr'. Did you mean 'inductor'"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(OptionError, match=message):
        setting(**options)
