"""compiled(model) equals eager(model, oracle cache): every family, form of attention and recipe.

One layer, so that keys and values are equal bit for bit and no code can flip (see tolerances).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvpass import PackedKV, Plan, Recipe, explain, oracle_cache, recipe
from kvpass.plan import LayerPlan
from tests.harness import batch_text, compiled, left_padding, oracle, run_steps
from tests.models import EAGER, FAMILIES, prompt, tiny_model
from tests.tolerances import logits

RECIPES = {
    "fp": recipe("fp"),
    "kivi-4bit": recipe("kivi-4bit", group=16, residual=16),
    "kivi-2bit": recipe("kivi-2bit", group=16, residual=16),
}
# The window crosses two flushes of keys and packs a value token a step.
STEPS = [70] + [1] * 20


# (Without padding in float32, of other families: tests/test_zoo.py.) These do nothing else than
# Llama with padding; without it they are cases of tests/test_folding.py and others.
ALIKE = ("qwen2", "qwen3")
PADDED, BF16 = ("sdpa", torch.float32, True), ("sdpa", torch.bfloat16, False)
WRITTEN_OUT = ("eager", torch.float32, True)
CASES = [
    *((family, *PADDED, "kivi-4bit") for family in FAMILIES if family not in ALIKE),
    *((family, *BF16, "kivi-2bit") for family in ("llama", "falcon")),
    *((family, *WRITTEN_OUT, "kivi-4bit") for family in ("llama", "gpt_neox")),
    *(("llama", *case, "fp") for case in (PADDED, BF16, WRITTEN_OUT)),
]


@pytest.mark.parametrize(("family", "attention", "dtype", "padded", "name"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:kvpass.*multi-query")
def test_logits_equal_the_oracles(
    family: str, attention: str, dtype: torch.dtype, padded: bool, name: str
) -> None:
    model = tiny_model(family, attention=attention, dtype=dtype, layers=1)
    ids, mask, visible = batch_text(sum(STEPS), padded)
    plain, _ = run_steps(model, ids, STEPS, mask, DynamicCache(config=model.config))
    chosen = RECIPES[name]
    wanted, _ = run_steps(model, ids, STEPS, mask, oracle(model, chosen))
    twin = compiled(model, chosen)
    got, cache = run_steps(twin, ids, STEPS, mask)
    assert all(isinstance(t, PackedKV) for x in cache.layers for t in (x.keys, x.values))
    assert (got - wanted)[visible].abs().max().item() <= logits(dtype, name)
    # What is packed is read packed.
    events = [e for graph in explain(twin).graphs for e in graph.events if e.required]
    assert events
    assert [e for e in events if not e.fired] == []
    effect = (wanted - plain)[visible].abs().max().item()
    # A recipe that changed nothing would make the comparison empty.
    assert effect == 0 if name == "fp" else effect > 10 * LOWEST[dtype]


def check(model: Any, chosen: Recipe, plan: Plan) -> None:
    """With left padding, compiled logits are the eager model's on the oracle's cache."""
    steps = [40, 1, 1, 3]
    ids, mask = prompt(3, sum(steps)), left_padding([20, 3, 0], sum(steps))
    wanted, _ = run_steps(model, ids, steps, mask, oracle_cache(plan, model.config))
    got, cache = run_steps(compiled(model, chosen), ids, steps, mask)
    assert all(isinstance(t, PackedKV) for x in cache.layers for t in (x.keys, x.values))
    error = (got - wanted)[mask.bool()].abs().max().item()
    assert error <= logits(model.dtype, chosen.name), error


@pytest.mark.parametrize("family", EAGER)
def test_written_out_attention(family: str) -> None:
    """The forms that only some families have."""
    model, chosen = tiny_model(family, attention="eager", layers=1), RECIPES["kivi-2bit"]
    check(model, chosen, chosen.plan(model.config))


def test_written_out_attention_in_bf16() -> None:
    """Some of it in float32: ALiBi."""
    model = tiny_model("mpt", attention="eager", layers=1, dtype=torch.bfloat16)
    check(model, RECIPES["fp"], RECIPES["fp"].plan(model.config))


@pytest.mark.parametrize(
    ("family", "attention"),
    [("deepseek_v2", "sdpa"), ("doge", "sdpa"), ("diffllama", "sdpa")],
)
def test_decoded_caches(family: str, attention: str) -> None:
    """Readers that no rule knows read what the recipe stores for tensors of unknown meaning."""
    model, chosen = tiny_model(family, attention=attention, layers=1), RECIPES["kivi-2bit"]
    if family == "doge":
        # Its attention is known; the mask is computed from the values as well.
        plan = chosen.plan(model.config)
    else:
        dims = (32, 8) if family == "deepseek_v2" else (16, 16)
        plan = Plan(LayerPlan(*(chosen.unknown_plan("*", dim) for dim in dims)))
    check(model, chosen, plan)


# What float32 and bf16 rounding alone can do to these logits; packing must do visibly more.
LOWEST = {torch.float32: 1e-4, torch.bfloat16: 2e-3}


@pytest.mark.parametrize(
    ("name", "attention", "padded"),
    [
        ("fp", "sdpa", True),
        ("kivi-2bit", "eager", False),
    ],
)
def test_chats_and_small_steps(name: str, attention: str, padded: bool) -> None:
    """A second prompt on a filled cache, steps of several tokens, and the window's borders."""
    steps = [40, 1, 1, 5, 16, 1, 33, 1]
    model = tiny_model("llama", attention=attention, layers=1)
    ids, mask, visible = batch_text(sum(steps), padded, seed=1)
    wanted, _ = run_steps(model, ids, steps, mask, oracle(model, RECIPES[name]))
    got, cache = run_steps(compiled(model, RECIPES[name]), ids, steps, mask)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, name)


@pytest.mark.parametrize("length", [1, 15, 16, 33])
def test_short_first_prompts(length: int) -> None:
    """Contexts of at most the residual, with grouped queries."""
    model, chosen = tiny_model("llama", layers=1), RECIPES["kivi-2bit"]
    steps = [length] + [1] * 5
    ids = prompt(1, sum(steps))
    wanted, _ = run_steps(model, ids, steps, None, oracle(model, chosen))
    got, _ = run_steps(compiled(model, chosen), ids, steps)
    assert (got - wanted).abs().max().item() <= logits(torch.float32, "kivi-2bit")


def test_inductor_equals_the_oracle() -> None:
    """The same through the default inner compiler."""
    model, chosen = tiny_model("qwen2", layers=1), RECIPES["kivi-2bit"]
    ids = prompt(1, sum(STEPS))
    wanted, _ = run_steps(model, ids, STEPS, None, oracle(model, chosen))
    got, _ = run_steps(compiled(model, chosen, inner="inductor"), ids, STEPS)
    assert (got - wanted).abs().max().item() <= logits(torch.float32, "kivi-2bit")


def test_a_plain_cache_is_packed_on_the_way() -> None:
    """A prompt read without kvpass goes on packed."""
    model, chosen = tiny_model("llama", layers=1), RECIPES["fp"]
    ids = prompt(1, 60)
    wanted, _ = run_steps(model, ids, [50] + [1] * 10)
    _, cache = run_steps(model, ids[:, :50], [50])
    got, cache = run_steps(compiled(model, chosen), ids[:, 50:], [1] * 10, cache=cache)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted[:, 50:]).abs().max().item() <= logits(torch.float32)
