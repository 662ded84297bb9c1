"""Rotations of channels leave every model's answers as they are. Those of values are in its
weights; those of keys, too, where no rotary embedding or norm stands between."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpass import LayerPlan, Plan, explain
from kvpass.inspect.report import GraphReport
from kvpass.ops import logical
from kvpass.ops.append_attention import StepArguments
from kvpass.ops.basis import rotate
from tests import bases
from tests.graph.recorder import run
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import logits

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "phi", "gpt_neox", "opt", "gpt2", "gemma3_text",
]  # fmt: skip
# Keys have no rotary embedding.
PLAIN_KEYS = ("opt", "gpt2")


def rotated(report: GraphReport) -> list[str]:
    """What is rotated in every call."""
    found = report.after.graph.find_nodes(op="call_function", target=logical.rotate_channels)
    apart = report.bound.graph.find_nodes(op="call_function", target=rotate)
    step = torch.ops.kvpass_cpp.append_attention.default
    steps = report.bound.graph.find_nodes(op="call_function", target=step)
    fused = [node for node in steps if node.args[StepArguments._fields.index("basis")] is not None]
    # The kernels of a decode step rotate new keys and the query.
    assert (len(apart), len(fused)) == ((len(found), 0) if len(found) < 2 else (0, 1))
    return [node.kwargs["x"].name for node in found]


def folds(report: GraphReport) -> list[Any]:
    return report.after.graph.find_nodes(op="call_function", target=logical.rotate_weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_and_values_are_folded(family: str) -> None:
    model = tiny_model(family, layers=1)
    steps = [20] + [1] * 5
    ids = prompt(2, sum(steps))
    wanted, plain = run_steps(model, ids, steps)
    twin = compiled(model, bases.rotated_plan(model), strict=True)
    got, cache = run_steps(twin, ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    for report in explain(twin).graphs:
        # Neither a value nor an output is rotated, and of a prompt only the keys that are stored.
        kept = [name[0] for name in rotated(report)]
        assert kept == ([] if family in PLAIN_KEYS else ["q", "k"][report.kind == "prefill" :])
        # The weight that makes the values, and the one that reads the output.
        assert len(folds(report)) >= 2
    held, expected = cache.layers[0].keys, plain.layers[0].keys
    assert held.basis is not None
    # In the model's basis, for whom reads it outside the graphs.
    shown = held.decode()[:, :, -expected.shape[2] :]
    assert (shown - expected).abs().max().item() <= logits(torch.float32)


def test_weights_that_are_no_plain_parameters_leave_values_rotated_in_every_call() -> None:
    model, steps = tiny_model("llama", layers=1), [20, 1, 1]
    ids = prompt(1, sum(steps))
    attention = model.model.layers[0].self_attn
    torch.nn.utils.parametrizations.weight_norm(attention.v_proj)
    torch.nn.utils.parametrizations.weight_norm(attention.o_proj)
    wanted, _ = run_steps(model, ids, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, _ = run_steps(compiled(model, bases.rotated_plan(model)), ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)


def test_keys_and_queries_of_a_prompt_are_rotated_back_only_together() -> None:
    def attend(q: Any, k: Any, v: Any, layer: Any) -> Any:
        keys, values = layer.update(k, v)
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    generator = torch.Generator().manual_seed(0)
    plan = Plan(LayerPlan(key_basis=bases.rotation(2, 16, generator)))
    # run() checks that the results of both graphs agree.
    prefill, decode = run(attend, [20, 1], plan)
    assert prefill.fired("cancel_rotations") == 1
    assert decode.fired("cancel_rotations") == 0
    left = [detail for _, detail in prefill.refused()]
    reason = "no rule moves a rotation through placeholder (at l_k_)"
    assert left == [f"channels are rotated in every call: {reason}"]
