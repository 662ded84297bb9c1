"""Linear layers of few tokens in generated C++, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as reference

from lowering.cpp import library, linear
from tests.strategies import randn
from tests.tolerances import CPP_LINEAR

# Outputs and inputs, which neither rows nor vectors divide; inputs of four tokens that the first
# cache does not hold.
SIZES = ((257, 1003), (261, 4099))
WEIGHT = randn(300, 1003)


def check(tokens, dtype):
    for outputs, inputs in SIZES:
        # Rows of the tokens' own numbers would outweigh all others.
        x = randn(2, tokens, inputs, dtype=dtype)[1:]
        weight = randn(outputs, inputs, seed=2, dtype=dtype)
        for bias in (None, randn(outputs, seed=1, dtype=dtype)):
            assert linear.unsupported_reason(x, weight, bias) is None
            got = linear.linear(x, weight, bias)
            wanted = reference(x.double(), weight.double(), None if bias is None else bias.double())
            assert got.shape == wanted.shape
            assert got.dtype == dtype
            error = float((got.double() - wanted).norm() / wanted.norm())
            assert error <= CPP_LINEAR[dtype]


@pytest.mark.parametrize("dtype", CPP_LINEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_products(tokens, dtype):
    check(tokens, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [2, 7, 16])
def test_tokens(tokens, dtype):
    check(tokens, dtype)


@pytest.mark.parametrize("tokens", [7, 16])
def test_tiles(tokens, tiles):
    check(tokens, torch.bfloat16)
    test_several_layers_of_the_same_tokens(tokens)


def test_layers_that_do_not_fill_tiles(loops):
    x, weight = (randn(n, 1003, seed=n, dtype=torch.bfloat16) for n in (7, 31))
    wanted = reference(x.double(), weight.double())
    got = linear.linear(x, weight)
    assert float((got.double() - wanted).norm() / wanted.norm()) <= CPP_LINEAR[torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_rows_with_scales(tokens):
    dtype = torch.bfloat16
    x, bias = randn(tokens, 1003, dtype=dtype), randn(300, dtype=dtype)
    weight = torch.arange(300 * 1003).remainder(255).sub(127).to(torch.int8).view(300, 1003)
    scale = 0.01 + randn(300, 1).abs()
    assert linear.unsupported_reason(x, weight, bias, scale) is None
    got = linear.linear(x, weight, bias, scale)
    wanted = reference(x.double(), weight * scale.double(), bias.double())
    assert float((got.double() - wanted).norm() / wanted.norm()) <= CPP_LINEAR[dtype]


@pytest.mark.parametrize("dtype", CPP_LINEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_transposed_weights(tokens, dtype):
    """As GPT-2 has them: neither rows nor columns are multiples of what is read at a time."""
    x, weight = randn(tokens, 1003, dtype=dtype), randn(1003, 261, dtype=dtype).t()
    for bias in (None, randn(261, seed=1, dtype=dtype)):
        assert linear.unsupported_reason(x, weight, bias) is None
        got = linear.linear(x, weight, bias)
        wanted = reference(x.double(), weight.double(), None if bias is None else bias.double())
        assert float((got.double() - wanted).norm() / wanted.norm()) <= CPP_LINEAR[dtype]


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_several_layers_of_the_same_tokens(tokens):
    """None of them is a multiple of what a thread has at a time."""
    dtype = torch.bfloat16
    x, sizes = randn(tokens, 1003, dtype=dtype), (257, 300, 131)
    weights = [randn(n, 1003, seed=i, dtype=dtype) for i, n in enumerate(sizes)]
    biases = [randn(257, dtype=dtype), None, randn(131, seed=1, dtype=dtype)]
    parts = x, weights, biases, [None] * 3
    assert linear.unsupported_linears(*parts) is None
    for got, weight, bias in zip(linear.linears(*parts), weights, biases, strict=True):
        assert torch.equal(got, linear.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"scales": [None, torch.ones(300, 1)]}, "scales in torch.float32; C++ takes int8"),
        (
            {"weights": [WEIGHT, WEIGHT.to(torch.int8)], "scales": [None, torch.ones(300, 1)]},
            "some weights have scales, and others have not",
        ),
        ({"weights": [WEIGHT, randn(1003, 300).t()]}, "stored by inputs are as fast one by one"),
    ],
)
def test_layers_that_are_not_alike_are_declined(changed, reason):
    layers = {"weights": [WEIGHT] * 2, "biases": [None] * 2, "scales": [None] * 2, **changed}
    assert reason in linear.unsupported_linears(randn(1, 1003), **layers)


def test_lanes(lanes):
    check(1, torch.bfloat16)
    test_transposed_weights(1, torch.bfloat16)
    test_rows_with_scales(1)


@pytest.mark.parametrize("answer", ["true", "false"])
def test_one_stream_and_several(monkeypatch, answer):
    """Both ways of reading, whatever this processor is."""
    question = '__builtin_cpu_is("intel")'

    def source(*args, **options):
        text = library.source(*args, **options)
        assert text.count(question) == 1
        return text.replace(question, answer)

    monkeypatch.setattr(linear, "source", source)
    for function in ("_source", "_function"):
        monkeypatch.setattr(linear, function, getattr(linear, function).__wrapped__)
    check(1, torch.bfloat16)
    check(3, torch.float32)
    test_transposed_weights(1, torch.float32)


@pytest.mark.parametrize("multiplies", [True, False])
def test_bfloat16_stored_by_inputs(monkeypatch, multiplies):
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: multiplies)
    x, weight = randn(5, 256).bfloat16(), randn(256, 512).bfloat16()
    assert linear.unsupported_reason(x, weight.t().contiguous()) is None
    reason = linear.unsupported_reason(x, weight.t())
    assert reason == ("it has 5 tokens; C++ takes 1 to 4" if multiplies else None)


def test_gaps_between_tokens():
    x, weight = randn(2, 2048)[:, ::2], randn(256, 1024)
    assert torch.equal(linear.linear(x, weight), linear.linear(x.contiguous(), weight))


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (randn(17, 256), randn(256, 256), "it has 17 tokens; C++ takes 1 to 16"),
        (randn(1, 256), randn(65536), "the weight has 1 dimensions"),
        (
            randn(1, 256),
            randn(256, 512)[:, ::2],
            "the weight, or what comes with it, is not contiguous",
        ),
        (randn(1, 256), randn(256, 512, dtype=torch.bfloat16), "of another dtype than the tokens"),
        (randn(1, 256).double(), randn(256, 256).double(), "torch.float64 is not supported"),
    ],
)
def test_declined(x, weight, reason):
    assert reason in linear.unsupported_reason(x, weight)
