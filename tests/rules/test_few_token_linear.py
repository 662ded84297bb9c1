"""Linear layers of a decode step: where the rules apply, and that logits stay."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from kvpass.inspect.report import reports
from tests.harness import compiled, run_steps
from tests.models import FAMILIES, prompt
from tests.tolerances import LOGITS_FP32

# Only the MLP's weights, and the head, are large enough to gain.
CONFIG = {**FAMILIES["llama"], "intermediate_size": 1024, "vocab_size": 2048, "hidden_size": 128}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=1)).eval()


def layers_by_kind(first):
    """The ops for linear layers, and who computes them, by graph."""
    made = [r for r in reports() if r.index >= first]
    return {r.kind: [(c.op, c.provider) for c in r.choices if "linear" in c.op] for r in made}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_decode_steps_gain_and_logits_stay(model, inner):
    first = max((r.index + 1 for r in reports()), default=0)
    ids, steps = prompt(2, 16), [12, 1, 1, 1, 1]
    twin = compiled(model, "fp", inner)
    got, _ = run_steps(twin, ids, steps)
    wanted, _ = run_steps(model, ids, steps)
    assert float((got - wanted).abs().max()) <= LOGITS_FP32
    # Gate and up read the same; then come down and the head. The small weights of attention are
    # worth calls where steps are replayed.
    layers = [("linears", "cpp"), ("linear", "cpp"), ("linear", "cpp")]
    if inner == "inductor":
        layers = [("linears", "cpp"), ("linear", "cpp"), *layers]
    assert layers_by_kind(first) == {"prefill": [], "decode": layers}


@pytest.mark.parametrize(("mode", "layers"), [(None, 5), ("default", 4)])
def test_weights_that_are_stored_by_inputs(mode, layers):
    """GPT-2's layers are ``addmm(bias, x, weight)``. The head is small: it is worth a call where
    steps are replayed."""
    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_layer": 1, "n_head": 4, "vocab_size": 128}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    first = max((r.index + 1 for r in reports()), default=0)
    ids, steps = prompt(2, 16), [12, 1, 1, 1, 1]
    got, _ = run_steps(compiled(gpt2, "fp", "inductor", mode=mode), ids, steps)
    wanted, _ = run_steps(gpt2, ids, steps)
    assert float((got - wanted).abs().max()) <= LOGITS_FP32
    assert layers_by_kind(first) == {"prefill": [], "decode": [("linear", "cpp")] * layers}


def test_a_sum_with_more_than_a_bias_stays():
    @torch.compile(backend="kvpass")
    def run(added, x, weight):
        return torch.addmm(added, x, weight)

    x, weight = torch.randn(2, 256), torch.randn(256, 512)
    for added in (torch.randn(2, 512), torch.randn(2, 1), torch.randn(1)):
        with torch.no_grad():
            assert torch.allclose(run(added, x, weight), added + x @ weight, atol=1e-4)
        assert reports()[-1].choices == []


def test_what_is_differentiated_stays():
    """A kernel has no gradient."""
    layer = torch.nn.Linear(256, 1024)
    run = torch.compile(lambda x: linear(x, layer.weight), backend="kvpass")
    run(torch.randn(1, 256)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        run(torch.randn(1, 256))
    assert [c.op for c in reports()[-1].choices] == ["linear"]


def test_autocast_stays():
    layer = torch.nn.Linear(256, 1024)

    @torch.compile(backend="kvpass")
    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    with torch.no_grad():
        assert run(torch.randn(1, 256)).dtype == torch.bfloat16
    assert reports()[-1].choices == []
