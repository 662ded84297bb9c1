"""Codecs and retentions that no recipe uses yet, end to end: compiled equals the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StaticCache

from kvpass import PackedKV, Plan, oracle_cache
from kvpass.format.parse import parse_plan
from kvpass.inner import InnerCompiler
from kvpass.plan import LayerPlan
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODES_FP32

STEPS = [1, 1, 5, 16, 1, 33, 1, 17, 3, 1]
# Each further kind of step is a graph to compile, and more kernels.
ALL_STEPS = ("sinks", "a filter", "many sinks, groups of tokens")
PLANS = {
    "3 bits": "int3.channel8/window=0,pack_every=16",
    "1 bit": "int1.token8/window=16,pack_every=1",
    "base 3": "int1.5.token16.fp8/window=16,pack_every=1",
    "2-bit slots": "int1.5.token16.ternary_in_2bit/window=16,pack_every=1",
    "sinks": "int2.token16.fp8.clip0.92/sinks=5,window=16,pack_every=1",
    "a filter": "int2.token16/sinks=2,window=16,pack_every=1,retained=4,filter=heavy_hitters",
    "many sinks, groups of tokens": "int4.channel8/sinks=43,window=0,pack_every=16",
    "tokens scaled to one variance": "int2.channel8.scale_by_token/window=0,pack_every=16",
}


def both(text: str) -> Plan:
    plan = parse_plan(text)
    return Plan(LayerPlan(plan, plan))


@pytest.mark.parametrize(
    ("name", "first"), [*((name, 40) for name in PLANS), ("sinks", 3), ("a filter", 3)]
)
def test_logits_equal_the_oracles(name: str, first: int) -> None:
    model, plan = tiny_model("llama", layers=1), both(PLANS[name])
    steps = [first, *(STEPS if name in ALL_STEPS else [1] * 20)]
    ids = prompt(2, sum(steps), seed=1)
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(plan, model.config))
    got, cache = run_steps(compiled(model, plan), ids, steps)
    assert isinstance(cache.layers[0].keys, PackedKV)
    assert (got - wanted).abs().max().item() <= LOGITS_CODES_FP32


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("step", [3, 30])
def test_a_failed_step_gives_back_the_places_of_sinks(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph breaks after everything has been appended; a retry answers as if it had not."""
    armed, compile_lowered = [False], InnerCompiler.compile_lowered

    def breaking(self: InnerCompiler, module: Any) -> Any:
        inner, modules = compile_lowered(self, module)

        def call(*args: Any) -> Any:
            results = inner(*args)
            if armed[0]:
                raise BrokenError
            return results

        return call, modules

    monkeypatch.setattr(InnerCompiler, "compile_lowered", breaking)
    model, plan = tiny_model("llama", layers=1), both("int2.token8/sinks=8,window=4,pack_every=1")
    steps = [4, 1, step, 1, 20, 1]
    ids = prompt(1, sum(steps))
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(plan, model.config))
    twin = compiled(model, plan)
    _, cache = run_steps(twin, ids[:, :5], steps[:2])
    armed[0] = True
    with pytest.raises(BrokenError):
        run_steps(twin, ids[:, 5 : 5 + step], [step], cache=cache)
    armed[0] = False
    got, _ = run_steps(twin, ids[:, 5:], steps[2:], cache=cache)
    assert (got - wanted[:, 5:]).abs().max().item() <= LOGITS_CODES_FP32


@pytest.mark.parametrize(("family", "first"), [("llama", 50), ("mistral", 3)])
def test_static_caches_have_no_sinks(family: str, first: int) -> None:
    model, plan = tiny_model(family, layers=1), both(PLANS["sinks"])
    without = both(PLANS["sinks"].replace("sinks=5,", ""))
    steps = [first, *[1] * 5, 20, 1]
    ids = prompt(1, sum(steps))
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(without, model.config))
    cache = StaticCache(config=model.config, max_cache_len=80)
    got, cache = run_steps(compiled(model, plan), ids, steps, cache=cache)
    assert cache.layers[0].keys.plan.sinks == 0
    assert (got - wanted).abs().max().item() <= LOGITS_CODES_FP32


def test_sliding_windows_have_no_sinks() -> None:
    model, plan = tiny_model("mistral", layers=1), both(PLANS["sinks"])
    steps = [70, *[1] * 5, 20, 1]
    ids = prompt(1, sum(steps))
    torch._dynamo.reset()
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(plan, model.config))
    got, cache = run_steps(compiled(model, plan), ids, steps)
    assert cache.layers[0].keys.plan.sinks == 0
    assert (got - wanted).abs().max().item() <= LOGITS_CODES_FP32
