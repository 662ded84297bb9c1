"""Linear layers of a decode step: where the rule applies, and that logits stay."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

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
    """How many linear layers who computes, by graph."""
    made = [r for r in reports() if r.index >= first]
    return {r.kind: [c.provider for c in r.choices if c.op == "linear"] for r in made}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_decode_steps_gain_and_logits_stay(model, inner):
    first = max((r.index + 1 for r in reports()), default=0)
    ids, steps = prompt(2, 16), [12, 1, 1, 1, 1]
    twin = compiled(model, "fp", inner)
    got, _ = run_steps(twin, ids, steps)
    wanted, _ = run_steps(model, ids, steps)
    assert float((got - wanted).abs().max()) <= LOGITS_FP32
    assert layers_by_kind(first) == {"prefill": [], "decode": ["cpp"] * 4}


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
