"""Models whose weights are quantized, by torchao."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpass import PackedKV, Plan, calibrate, explain, importance, oracle_cache, recipe
from kvpass.errors import OptionError
from kvpass.inspect.report import reports
from kvpass.replay import Replayed
from tests.harness import compiled, run_steps
from tests.models import FAMILIES, prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, LOGITS_FP32

quantization = pytest.importorskip("torchao.quantization")


def plan_of(model: Any, name: str) -> Plan:
    if name.startswith("kivi"):
        return recipe(name, group=8, residual=16).plan(model.config)
    texts = [prompt(1, 60, seed=i) for i in range(2)]
    return calibrate(model, name, texts, window=8, progress=False)


@pytest.mark.parametrize("name", ["kivi-4bit", "kvquant-nuq3-1%"])
def test_a_packed_cache_beside_int8_weights(name: str) -> None:
    model = tiny_model("llama", layers=1)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch._dynamo.reset()
    plan = plan_of(model, name)
    ids, steps = prompt(1, 60), [40] + [1] * 20
    twin = compiled(model, plan, strict=True)
    got, cache = run_steps(twin, ids, steps)
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(plan, model.config, model))
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert "attention: cpp" in str(explain(twin))


def test_the_importance_of_int8_weights_is_refused() -> None:
    model = tiny_model("llama", layers=1)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(OptionError, match="no matrix of floating numbers"):
        importance(model, [prompt(1, 30)[0]], progress=False)


@torch.no_grad()
def test_few_tokens_are_multiplied_by_int8_weights_as_they_are() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "intermediate_size": 4096}
    config = LlamaConfig(**{**FAMILIES["llama"], **sizes}, num_hidden_layers=1)
    model = LlamaForCausalLM(config).eval()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    ids, steps = prompt(1, 14), [8, *[1] * 6]
    wanted, _ = run_steps(model, ids, steps)
    twin = compiled(model, "fp", "inductor")
    real = Replayed._call_unknown
    with patch.object(Replayed, "_call_unknown", autospec=True, side_effect=real) as unknown:
        got, _ = run_steps(twin, ids, steps)
    assert (got - wanted).abs().max().item() <= LOGITS_FP32
    # The third step and those behind it are replayed: the parts of the weights lie where they did.
    assert unknown.call_count == 2
    # Queries, keys and values are one op, gate and up another.
    layers = [(c.op, c.provider) for c in reports()[-1].choices if "linear" in c.op]
    ops = ["linears", "linear", "linears", "linear", "linear"]
    assert layers == [(op, "cpp") for op in ops]


@torch.no_grad()
def test_activations_that_are_quantized_stay_so() -> None:
    layer = torch.nn.Linear(512, 1024)
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    torch.compile(layer, backend="kvpass")(torch.randn(1, 512))
    assert reports()[-1].choices == []
