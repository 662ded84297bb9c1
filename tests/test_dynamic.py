"""``dynamic`` and ``fullgraph`` of ``torch.compile``: packed, and equal to the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import Graph
from transformers import DynamicCache, StaticCache

from kvpass import recipe
from kvpass.graph.specialize import specialize
from tests.harness import batch_text, oracle, run_steps
from tests.models import tiny_model
from tests.tolerances import logits

KIVI = recipe("kivi-2bit", group=16, residual=16)
STEPS = (40, 1, 1, 1)
DYNAMIC = {"dynamic": True}


@pytest.mark.parametrize(
    ("family", "attention", "static", "padded", "how"),
    [
        ("llama", "sdpa", False, True, DYNAMIC),
        ("llama", "eager", True, False, DYNAMIC),
        ("mistral", "eager", False, True, DYNAMIC),
        ("mistral", "sdpa", True, True, DYNAMIC),
        ("qwen2", "sdpa", False, False, {"dynamic": False}),
        ("llama", "sdpa", True, False, {"fullgraph": True}),
    ],
)
def test_steps(family: str, attention: str, static: bool, padded: bool, how: Any) -> None:
    torch._dynamo.reset()
    model = tiny_model(family, layers=1, attention=attention)
    ids, mask, visible = batch_text(sum(STEPS), padded)
    wanted, _ = run_steps(model, ids, STEPS, mask, oracle(model, KIVI))
    twin = copy.deepcopy(model)
    # Strict: all of the cache is packed, and read packed.
    options = {"recipe": KIVI, "inner": "eager", "strict": True}
    twin.compile(backend="kvpass", options=options, **how)
    config = model.config
    cache = StaticCache(config, max_cache_len=100) if static else DynamicCache(config=config)
    got, _ = run_steps(twin, ids, STEPS, mask, cache)
    assert (got - wanted)[visible].abs().max().item() <= logits(torch.float32, "kivi-2bit")


def test_floats_of_graphs_without_attention_stay() -> None:
    """They may change in every call, and nothing here depends on them."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    half = graph.call_method("item", (x,))
    half.meta["example_value"] = torch.SymFloat(0.5)
    scaled = graph.call_method("mul", (x, half))
    graph.output((scaled,))
    specialize(graph)
    assert scaled.args == (x, half)
