"""Codecs and residencies that no recipe uses yet, end to end: compiled equals the oracle."""

from __future__ import annotations

import pytest
import torch

from kvpass import PackedKV, Plan, oracle_cache
from kvpass.cache.residency import TensorPlan
from kvpass.plan import LayerPlan
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODES_FP32

STEPS = [40, 1, 1, 5, 16, 1, 33, 1, 17, 3, 1]
PLANS = {
    "fp8 and clip": "int2.token16.fp8.clip0.92/window=16,flush=1",
    "3 bits": "int3.channel8/window=0,flush=16",
    "1 bit": "int1.token8/window=16,flush=1",
    "base 3": "int1.5.token16.fp8/window=16,flush=1",
    "2-bit slots": "int1.5.token16.slots/window=16,flush=1",
}


def both(text: str) -> Plan:
    plan = TensorPlan.parse(text)
    return Plan(LayerPlan(plan, plan))


@pytest.mark.parametrize("name", PLANS)
def test_logits_equal_the_oracles(name: str) -> None:
    model, plan = tiny_model("llama", layers=1), both(PLANS[name])
    ids = prompt(2, sum(STEPS), seed=1)
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, STEPS, None, oracle_cache(plan, model.config))
    got, cache = run_steps(compiled(model, plan), ids, STEPS)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted).abs().max().item() <= LOGITS_CODES_FP32
