"""Linear layers of few tokens in generated C++, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as reference

from lowering.cpp import linear
from tests.strategies import randn
from tests.tolerances import CPP_LINEAR

# Outputs and inputs, which neither rows nor vectors divide; inputs of four tokens that the first
# cache does not hold.
SIZES = ((257, 1003), (261, 4099))


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
    if tokens <= linear.most_tokens(dtype):
        check(tokens, dtype)
    else:
        x, weight = randn(tokens, 256, dtype=dtype), randn(512, 256, dtype=dtype)
        assert f"it has {tokens} tokens" in linear.unsupported_reason(x, weight)


@pytest.mark.parametrize("tokens", [1, 4, linear.most_tokens(torch.bfloat16)])
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


def test_lanes(lanes):
    check(1, torch.bfloat16)
    test_transposed_weights(1, torch.bfloat16)
    test_rows_with_scales(1)


def test_gaps_between_tokens():
    x, weight = randn(2, 2048)[:, ::2], randn(256, 1024)
    assert torch.equal(linear.linear(x, weight), linear.linear(x.contiguous(), weight))


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (randn(17, 256), randn(256, 256), "it has 17 tokens; C++ takes 1 to 16"),
        (
            randn(5, 256).bfloat16(),
            randn(256, 512).bfloat16().t(),
            "it has 5 tokens; C++ takes 1 to 4",
        ),
        (randn(1, 256), randn(255, 256), "the weight is small: less than 262144 bytes"),
        (randn(1, 256), randn(256, 512)[:, ::2], "the weight, or the bias, is not contiguous"),
        (randn(1, 256), randn(256, 512, dtype=torch.bfloat16), "of another dtype than the tokens"),
        (randn(1, 256).double(), randn(256, 256).double(), "torch.float64 is not supported"),
    ],
)
def test_declined(x, weight, reason):
    assert reason in linear.unsupported_reason(x, weight)
