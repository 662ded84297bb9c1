"""Linear layers of the same tokens as one op: which are joined, and that results stay."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvpass.inspect.report import reports
from tests.strategies import randn


def ops_of(function, *arguments):
    """The ops for linear layers in a graph; its results are those of PyTorch."""
    with torch.no_grad():
        got, wanted = torch.compile(function, backend="kvpass")(*arguments), function(*arguments)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    return [c.op for c in reports()[-1].choices]


WEIGHTS = [randn(outputs, 256, seed=outputs) for outputs in (512, 256, 301)]
X = randn(3, 256)


def test_layers_of_the_same_tokens_are_one_op():
    def run(x, bias):
        first = linear(x, WEIGHTS[0], bias).tanh()
        return first, linear(x, WEIGHTS[1]), linear(x + 1, WEIGHTS[1]), linear(x, WEIGHTS[2])

    assert ops_of(run, X, randn(512)) == ["linears", "linear"]


def test_tokens_that_change_between_layers_are_read_twice():
    def run(x):
        x = x.clone()
        first = linear(x, WEIGHTS[0])
        x.add_(1)
        return first, linear(x, WEIGHTS[1])

    assert ops_of(run, X) == ["linear", "linear"]


def test_weights_that_are_made_of_the_first_layer_come_after_it():
    def run(x):
        first = linear(x, WEIGHTS[0])
        return first, linear(x, WEIGHTS[1] * first.mean()), linear(x, WEIGHTS[2])

    assert ops_of(run, X) == ["linears", "linear"]


def test_weights_that_are_stored_by_inputs_stay_apart():
    turned = randn(256, 512)

    def run(x):
        return linear(x, turned.t()), linear(x, WEIGHTS[0])

    assert ops_of(run, X) == ["linear", "linear"]
