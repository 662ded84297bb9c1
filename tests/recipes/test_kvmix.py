"""KVmix and the recipe that mixes all methods."""

from __future__ import annotations

import pytest

from kvpass import LayerPlan, calibrate, importance, oracle_cache, recipe
from kvpass.calibration.samples import STORED
from kvpass.errors import OptionError, PlanError
from kvpass.recipes import Auto
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP

TEXTS = [prompt(1, 60, seed=i)[0] for i in range(2)]


def codecs(plan: LayerPlan) -> tuple[str, str]:
    return str(plan.keys.codec), str(plan.values.codec)


def test_important_layers_get_more_bits() -> None:
    model = tiny_model("llama", layers=4)
    plan = calibrate(model, "kvmix", TEXTS, progress=False, share=0.25, group=8, residual=8)
    found = importance(model, TEXTS, progress=False)
    for kind, low, high in (("keys", 2, 3), ("values", 2, 4)):
        best = max(found, key=lambda layer: getattr(found[layer], kind))
        for path, layer in plan.layers.items():
            assert getattr(layer, kind).codec.bits == (high if path == best else low)


@pytest.mark.parametrize(("layers", "more"), [(10, 2), (4, 0)])
def test_the_share_is_rounded_down(layers: int, more: int) -> None:
    model = tiny_model("llama", layers=layers)
    plan = calibrate(model, "kvmix-k2.19v2.38", TEXTS, progress=False, group=8, residual=8)
    bits = [(p.keys.codec.bits, p.values.codec.bits) for p in plan.layers.values()]
    assert [k for k, _ in bits].count(3) == [v for _, v in bits].count(4) == more


def test_names() -> None:
    """Means over 32 layers, as in the paper: 6 of them, and 9."""
    assert recipe("kvmix", share=0.2).name == "kvmix-k2.19v2.38"
    assert recipe("kvmix", share=0.3).name == "kvmix-k2.28v2.56"
    assert recipe("kvmix", share=0.5).name == "kvmix"


def test_ratios_and_packing_by_importance() -> None:
    """Of keys and values apart; groups of both are packed whole."""
    model = tiny_model("llama", layers=2)
    fields = {"share": 0.5, "group": 8, "exact": "pivotal", "packing": "11-per-int32"}
    plan = calibrate(model, "kvmix", TEXTS, progress=False, **fields)
    keys, values = (sorted(str(getattr(p, k)) for p in plan.layers.values()) for k in STORED)
    assert keys == [
        "int2.channel8/window=0,pack_every=8,pivotal=0.1",
        "int3.channel8.pack11/window=0,pack_every=8,pivotal=0.2",
    ]
    assert values == [
        "int2.token8/window=0,pack_every=8,pivotal=0.1",
        "int4.token8/window=0,pack_every=8,pivotal=0.2",
    ]


@pytest.mark.parametrize("name", ["kvmix as written", "auto"])
def test_different_codecs_in_one_graph_equal_the_oracle(name: str) -> None:
    model = tiny_model("llama", layers=2)
    fields = {
        "kvmix as written": {"share": 0.5, "group": 8, "exact": "pivotal", "ratio": 0.5,
                             "packing": "11-per-int32", "more_value_bits": 3},
        "auto": {"budget": 4.2, "window": 16, "sinks": 2},
    }[name]  # fmt: skip
    plan = calibrate(model, name.split()[0], TEXTS, progress=False, **fields)
    assert len({codecs(p) for p in plan.layers.values()}) > 1
    ids, steps = prompt(1, 60), [40] + [1] * 20
    got, _ = run_steps(compiled(model, plan, strict=True), ids, steps)
    wanted, _ = run_steps(model, ids, steps, None, oracle_cache(plan, model.config, model))
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP


def test_auto_keeps_its_budget() -> None:
    model = tiny_model("llama", head_dim=32, layers=2)
    plan = calibrate(model, Auto(budget=3.5, window=32, sinks=2), TEXTS, progress=False)
    codecs = [c for p in plan.layers.values() for c in (p.keys.codec, p.values.codec)]
    bits = [c.bits_per_element(32, 2) for c in codecs]
    assert sum(bits) / len(bits) <= 3.5
    assert plan.recipe == "auto"


@pytest.mark.parametrize(("fields", "match"), [
    ({"share": 1.5}, "share=1.5 is not supported; allowed: from 0 to 1"),
    ({"key_bits": 5}, "key_bits=5 is not supported; allowed: 1, 2, 3, 4, 8"),
    ({"residual": 0}, "residual=0"),
    ({"exact": "all"}, "exact='all' is not supported; allowed: 'window', 'pivotal', 'fraction'"),
    ({"ratio": 1.0}, "ratio=1.0 is not supported; allowed: from 0.001 to 0.999"),
    ({"packing": 3}, "packing=3 is not supported; allowed: '3-bit', '11-per-int32'"),
])  # fmt: skip
def test_options(fields: dict[str, object], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        recipe("kvmix", **fields)


def test_options_of_auto() -> None:
    with pytest.raises(OptionError, match="budget=0 is not supported"):
        recipe("auto", budget=0)
    with pytest.raises(OptionError, match="budget_bits=1 cannot be kept"):
        calibrate(tiny_model("llama"), "auto", TEXTS, progress=False, budget=1, window=16)
    with pytest.raises(PlanError, match="is calibrated: use the plan that"):
        recipe("auto").layer_plan("*", 64, 64)
