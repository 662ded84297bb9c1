"""Rotations of channels leave every model's answers as they are. Those of values are in its
weights; those of keys, too, where no rotary embedding or norm stands between."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import StaticCache

from kvpass import LayerPlan, Plan, explain, fold_inplace, oracle_cache
from kvpass.format.parse import parse_plan
from kvpass.inspect.report import GraphReport
from kvpass.ops import logical
from kvpass.ops.basis import rotate
from tests import bases
from tests.graph.recorder import run
from tests.harness import (
    batch_text,
    compiled,
    error_to_oracle,
    left_padding,
    run_steps,
)
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, logits

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "phi", "gpt_neox", "opt", "gpt2", "gemma3_text",
]  # fmt: skip
# Keys have no rotary embedding.
PLAIN_KEYS = ("opt", "gpt2")
KEYS = parse_plan("int2.token8/window=8,pack_every=8")
VALUES = parse_plan("int4.token8/window=0,pack_every=1")


def rotated(report: GraphReport) -> list[str]:
    """What is rotated in every call."""
    found = report.after.graph.find_nodes(op="call_function", target=logical.rotate_channels)
    assert len([n for n in report.bound.graph.nodes if n.target is rotate]) == len(found)
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


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gpt_neox", "eager")])
def test_codecs_equal_the_oracle(family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention, layers=1)
    steps = [50] + [1] * 12 + [5, 20, 1]
    ids, mask, visible = batch_text(sum(steps), padded=family == "llama")
    plan = bases.rotated_plan(model, KEYS, VALUES)
    wanted, _ = run_steps(model, ids, steps, mask, oracle_cache(plan, model.config))
    got, _ = run_steps(compiled(model, plan), ids, steps, mask)
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, "kivi")
    plain = Plan(LayerPlan(KEYS, VALUES))
    other, _ = run_steps(model, ids, steps, mask, oracle_cache(plain, model.config))
    # Groups of other numbers: the rotations do reach the codecs.
    assert (wanted - other)[visible].abs().max().item() > 100 * logits(torch.float32, "kivi")


def test_inductor_with_left_padding() -> None:
    model, steps = tiny_model("llama", layers=1), [20, 1, 1, 1]
    ids, mask = prompt(3, sum(steps)), left_padding([9, 3, 0], sum(steps))
    wanted, _ = run_steps(model, ids, steps, mask)
    twin = compiled(model, bases.rotated_plan(model), inner="inductor")
    got, _ = run_steps(twin, ids, steps, mask)
    assert (got - wanted)[mask.bool()].abs().max().item() <= logits(torch.float32)


def test_static_cache() -> None:
    model, steps = tiny_model("llama", layers=1), [20] + [1] * 5 + [3, 20, 1]
    ids, plan = prompt(1, sum(steps)), bases.rotated_plan(model)
    wanted, _ = run_steps(model, ids, steps)
    twin = compiled(model, plan)
    got, cache = run_steps(twin, ids, steps, cache=StaticCache(model.config, max_cache_len=64))
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert cache.layers[0].keys.basis == plan.layer_at(0).key_basis


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_folded_in_place(family: str) -> None:
    model = tiny_model(family)
    plan, twin = bases.rotated_plan(model, KEYS, VALUES), copy.deepcopy(model)
    torch._dynamo.reset()
    folded = fold_inplace(twin, plan)
    steps = [20, 1, 1, 3]
    ids = prompt(2, sum(steps))
    eager, _ = run_steps(model, ids, steps)
    got, _ = run_steps(twin, ids, steps)
    assert (got - eager).abs().max().item() <= logits(torch.float32)
    for layer in folded.layers.values():
        assert layer.value_basis is None
        assert (layer.key_basis is not None) == (family not in PLAIN_KEYS)
    packed = compiled(twin, folded, strict=True)
    assert error_to_oracle(packed, model, plan, ids, steps) <= LOGITS_CODE_FLIP


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
