"""Bases of channels leave every model's answers as they are, and orders no trace in its decode
graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvpass import (
    ChannelOrder,
    LayerPlan,
    PackedKV,
    Plan,
    explain,
    fold_inplace,
    folding,
    oracle_cache,
)
from kvpass.errors import PlanError
from kvpass.format.parse import parse_plan
from kvpass.inspect.report import GraphReport
from kvpass.ops import logical
from kvpass.ops.basis import rotate
from tests import bases
from tests.harness import (
    batch_text,
    compiled,
    error_to_oracle,
    graphs_compiled,
    left_padding,
    run_steps,
)
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP, logits

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "glm4", "olmo2", "gpt_neox", "opt", "gpt2",
]  # fmt: skip
KEYS = parse_plan("int2.token8/window=8,pack_every=8")
VALUES = parse_plan("int4.token8/window=0,pack_every=1")
PlanOf = Callable[..., Plan]
# Orders that fold, and rotations.
BOTH = pytest.mark.parametrize("plan_of", [bases.plan, bases.rotated_plan])


def gathers(report: GraphReport) -> list[Any]:
    """The nodes whose channels are permuted in every call."""
    nodes = report.after.graph.find_nodes(op="call_function", target=logical.rotate_channels)
    return [node.kwargs["x"] for node in nodes]


def refusals(report: GraphReport) -> list[str]:
    # Keys in an order are rotated before they are appended, by cosines in that order.
    refused = [e for e in report.events if not e.fired and e.rule != "fuse_rope_append"]
    return [event.detail for event in refused]


def assert_folded(report: GraphReport, layers: int = 2) -> None:
    """Nothing but cosines and sines is permuted in a call, once per layer each."""
    assert refusals(report) == []
    tables = gathers(report)
    assert len(tables) in (0, 2 * layers)
    for table in tables:
        # [1, 1, n, D], the same for all heads, and not computed by a layer's weights.
        assert table.meta["example_value"].shape[1] == 1
        behind, seen = [table], set()
        while behind:
            node = behind.pop()
            seen.add(node)
            behind += [n for n in node.all_input_nodes if n not in seen]
        assert not any("parameters" in str(node.target) for node in seen), table
    left = [n for n in report.bound.graph.nodes if n.target is rotate]
    assert len(left) == len(tables)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(name, "sdpa") for name in FAMILIES] + [("llama", "eager")],
)
def test_logits_stay_and_orders_are_folded(family: str, attention: str) -> None:
    model = tiny_model(family, attention=attention, layers=1)
    steps = [20] + [1] * 5
    ids = prompt(2, sum(steps))
    wanted, plain = run_steps(model, ids, steps)
    twin = compiled(model, bases.plan(model), strict=True)
    got, cache = run_steps(twin, ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    reports = explain(twin).graphs
    assert {report.kind for report in reports} == {"prefill", "decode"}
    for report in reports:
        assert_folded(report, layers=1)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        for held, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            assert isinstance(held, PackedKV)
            assert held.basis is not None
            # In the model's order, for whom reads it outside the graphs.
            shown = held.decode()[:, :, -expected.shape[2] :]
            assert (shown - expected).abs().max().item() <= logits(torch.float32)


@pytest.mark.parametrize(
    ("family", "attention", "padded", "plan_of"),
    [
        ("llama", "sdpa", True, bases.plan),
        ("mistral", "sdpa", False, bases.plan),
        ("gpt_neox", "eager", False, bases.plan),
        ("llama", "sdpa", True, bases.rotated_plan),
        ("gpt_neox", "eager", False, bases.rotated_plan),
    ],
)
def test_codecs_equal_the_oracle(
    family: str, attention: str, padded: bool, plan_of: PlanOf
) -> None:
    model = tiny_model(family, attention=attention, layers=1)
    steps = [50] + [1] * 12 + [5, 20, 1]
    ids, mask, visible = batch_text(sum(steps), padded)
    ordered = plan_of(model, KEYS, VALUES)
    wanted, _ = run_steps(model, ids, steps, mask, oracle_cache(ordered, model.config))
    got, _ = run_steps(compiled(model, ordered), ids, steps, mask)
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, "kivi")
    plain = Plan(LayerPlan(KEYS, VALUES))
    other, _ = run_steps(model, ids, steps, mask, oracle_cache(plain, model.config))
    # Groups of other numbers: the bases do reach the codecs.
    assert (wanted - other)[visible].abs().max().item() > 100 * logits(torch.float32, "kivi")


@BOTH
def test_inductor_with_left_padding(plan_of: PlanOf) -> None:
    model, steps = tiny_model("llama", layers=1), [20, 1, 1, 1]
    ids, mask = prompt(3, sum(steps)), left_padding([9, 3, 0], sum(steps))
    wanted, _ = run_steps(model, ids, steps, mask)
    got, _ = run_steps(compiled(model, plan_of(model), inner="inductor"), ids, steps, mask)
    assert (got - wanted)[mask.bool()].abs().max().item() <= logits(torch.float32)


def test_no_more_graphs_than_without_orders() -> None:
    model, steps = tiny_model("llama"), [20] + [1] * 20
    twin = compiled(model, bases.plan(model))
    before = graphs_compiled()
    for seed in (0, 1):
        run_steps(twin, prompt(1, sum(steps), seed), steps)
    assert graphs_compiled() - before == 2


@BOTH
def test_static_cache(plan_of: PlanOf) -> None:
    model, steps = tiny_model("llama", layers=1), [20] + [1] * 5 + [3, 20, 1]
    ids, ordered = prompt(1, sum(steps)), plan_of(model)
    wanted, _ = run_steps(model, ids, steps)
    twin = compiled(model, ordered)
    got, cache = run_steps(twin, ids, steps, cache=StaticCache(model.config, max_cache_len=64))
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert cache.layers[0].keys.basis == ordered.layer_at(0).key_basis
    decode = next(r for r in explain(twin).graphs if r.kind == "decode")
    if plan_of is bases.plan:
        assert_folded(decode, layers=1)


def test_static_cache_that_was_filled_elsewhere() -> None:
    model, steps = tiny_model("llama", layers=1), [20] + [1] * 5
    ids, ordered = prompt(1, sum(steps)), bases.plan(model)
    wanted, _ = run_steps(model, ids, steps)
    cache = StaticCache(model.config, max_cache_len=64)
    run_steps(model, ids[:, :20], [20], cache=cache)
    got, cache = run_steps(compiled(model, ordered), ids[:, 20:], [1] * 5, cache=cache)
    assert (got - wanted[:, 20:]).abs().max().item() <= logits(torch.float32)
    assert cache.layers[0].keys.basis == ordered.layer_at(0).key_basis


def test_a_cache_goes_on_as_it_was_begun() -> None:
    """With other orders, with none, and in eager mode."""
    model, steps = tiny_model("llama"), [20, 1, 1]
    ids = prompt(1, 30)
    wanted, _ = run_steps(model, ids, [20] + [1] * 10)
    first, second = bases.plan(model), Plan(bases.layer_plan(model, seed=7))
    for begun, then in ((first, second), (first, Plan()), (Plan(), first), (first, None)):
        torch._dynamo.reset()
        _, cache = run_steps(compiled(model, begun), ids[:, :22], steps)
        other = model if then is None else compiled(model, then)
        got, cache = run_steps(other, ids[:, 22:], [1] * 8, cache=cache)
        assert (got - wanted[:, 22:]).abs().max().item() <= logits(torch.float32)
        held = cache.layers[0].keys
        assert isinstance(held, PackedKV)
        assert held.basis == begun.layer_at(0).key_basis


def test_gradients_decode_to_the_models_order() -> None:
    model, ids = tiny_model("llama"), prompt(1, 21)
    wanted, _ = run_steps(model, ids, [20, 1])
    twin = compiled(model, bases.plan(model))
    _, cache = run_steps(twin, ids[:, :20], [20])
    with pytest.warns(UserWarning, match="gradients are enabled"):
        got = twin(ids[:, 20:], past_key_values=cache, use_cache=True).logits
    assert (got - wanted[:, 20:]).abs().max().item() <= logits(torch.float32)


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(-0.5),
    "storage": lambda layer: setattr(layer.weight, "data", layer.weight.data * -0.5),
    "object": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * -0.5)),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [("k_proj", "in place"), ("o_proj", "in place"), ("k_proj", "storage"), ("o_proj", "object")],
)
def test_changed_weights_are_never_used_stale(name: str, change: str) -> None:
    model, steps = tiny_model("qwen2"), [20, 1, 1]
    ids = prompt(1, 44)
    twin = compiled(model, bases.plan(model))
    before, _ = run_steps(twin, ids[:, :22], steps)
    graphs = graphs_compiled()
    with torch.no_grad():
        for m in (model, twin):
            CHANGES[change](getattr(m.model.layers[1].self_attn, name))
    wanted, _ = run_steps(model, ids[:, :22], steps)
    got, _ = run_steps(twin, ids[:, :22], steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert (got - before).abs().max().item() > LOGITS_CODE_FLIP
    assert graphs_compiled() == graphs


def test_one_copy_serves_all_graphs_and_goes_with_them() -> None:
    model = tiny_model("llama")
    torch._dynamo.reset()
    gc.collect()
    # What earlier tests still hold.
    before = set(folding._shared)
    twin = compiled(model, bases.plan(model))
    run_steps(twin, prompt(1, 22), [20, 1, 1])
    # Four weights in each of two layers, in prefill and decode.
    assert [r.kind for r in explain(twin).graphs] == ["prefill", "decode"]
    assert len(set(folding._shared) - before) == 8
    del twin
    torch._dynamo.reset()
    gc.collect()
    assert set(folding._shared) <= before


def test_two_models_take_turns_on_one_graph() -> None:
    first, steps = tiny_model("llama"), [20, 1, 1]
    ids, ordered = prompt(1, 22), bases.plan(first)
    twins = [compiled(first, ordered), compiled(tiny_model("llama", seed=1), ordered)]
    for _ in range(2):
        for twin, model in zip(twins, (first, tiny_model("llama", seed=1)), strict=True):
            wanted, _ = run_steps(model, ids, steps)
            got, _ = run_steps(twin, ids, steps)
            assert (got - wanted).abs().max().item() <= logits(torch.float32)


def test_tied_projections() -> None:
    """One weight serves keys, values and queries, of two layers."""
    model = tiny_model("opt")
    shared = model.model.decoder.layers[0].self_attn.k_proj.weight
    for layer in model.model.decoder.layers:
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            getattr(layer.self_attn, name).weight = shared
    ids, steps = prompt(1, 24), [20, 1, 1, 1, 1]
    wanted, _ = run_steps(model, ids, steps)
    twin = copy.deepcopy(model)
    twin.compile(backend="kvpass", options={"recipe": bases.plan(model), "inner": "eager"})
    got, _ = run_steps(twin, ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    assert_folded(explain(twin).graphs[-1])


def test_orders_that_break_pairs_stay_gathers() -> None:
    model, steps = tiny_model("llama", layers=1), [20] + [1] * 5
    free = bases.free(2, 16, torch.Generator().manual_seed(0))
    ordered = Plan(LayerPlan(key_basis=ChannelOrder.of(free)))
    ids = prompt(1, sum(steps))
    wanted, _ = run_steps(model, ids, steps)
    twin = compiled(model, ordered, strict=True)
    got, _ = run_steps(twin, ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32)
    for report in explain(twin).graphs:
        assert [node.name for node in gathers(report)] == ["q_embed", "k_embed"]
        reason = "channels are gathered in every call: the order does not keep the pairs of the "
        assert refusals(report) == [
            f"{reason}rotary embedding (at {name})" for name in ("q_embed", "k_embed")
        ]
    assert "left    basis_left" in str(explain(twin))


def test_orders_for_another_model() -> None:
    model = tiny_model("llama", layers=1)
    for (heads, dim), expected in {(4, 16): "2 heads of 16", (2, 8): "heads of 16"}.items():
        order = ChannelOrder.of(torch.arange(dim).expand(heads, dim).contiguous())
        with pytest.raises(PlanError) as caught:
            run_steps(compiled(model, Plan(LayerPlan(value_basis=order))), prompt(1, 8), [8])
        sentence = f"it is for {heads} heads of {dim} channels, the model has {expected}."
        assert sentence in str(caught.value)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(beams: int) -> None:
    model, ids = tiny_model("llama"), prompt(2, 12)
    options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    wanted = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    got = compiled(model, bases.plan(model)).generate(ids, **options)
    assert torch.equal(got, wanted)


# A key's rotation that stays is done in every call, an order is folded into copies.
@pytest.mark.parametrize(
    ("family", "plan_of", "keys_stay", "copies"),
    [
        ("llama", bases.plan, True, True),
        ("gpt2", bases.plan, False, False),
        ("opt", bases.plan, False, False),
        ("llama", bases.rotated_plan, True, False),
        ("opt", bases.rotated_plan, False, False),
    ],
)
def test_what_is_folded_in_place_needs_no_copies(
    family: str, plan_of: PlanOf, keys_stay: bool, copies: bool
) -> None:
    model = tiny_model(family, layers=1)
    plan, twin = plan_of(model, KEYS, VALUES), copy.deepcopy(model)
    torch._dynamo.reset()
    folded = fold_inplace(twin, plan)
    steps = [20, 1, 1, 3]
    ids = prompt(2, sum(steps))
    eager, _ = run_steps(model, ids, steps)
    # The model itself answers as before, with other weights.
    got, _ = run_steps(twin, ids, steps)
    assert (got - eager).abs().max().item() <= logits(torch.float32)
    before, after = model.state_dict(), twin.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for layer in folded.layers.values():
        assert layer.value_basis is None
        assert (layer.key_basis is not None) == keys_stay
        assert (layer.keys, layer.values) == (KEYS, VALUES)
    compiled_twin = compiled(twin, folded, strict=True)
    assert error_to_oracle(compiled_twin, model, plan, ids, steps) <= LOGITS_CODE_FLIP
    for report in explain(compiled_twin).graphs:
        weights = report.after.graph.find_nodes(op="call_function", target=logical.rotate_weight)
        assert bool(weights) == copies


def test_a_compiled_model_is_not_folded_in_place() -> None:
    model = tiny_model("llama", layers=1)
    with pytest.raises(PlanError, match="compiled already"):
        fold_inplace(compiled(model, "fp"), bases.plan(model))
