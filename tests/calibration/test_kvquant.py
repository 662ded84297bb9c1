"""KVQuant's calibration against NumPy, scikit-learn and autograd, and its plans end to end."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch.nn.functional import cross_entropy

from kvpass import PackedKV, Plan, RetentionPolicy, calibrate, oracle_cache, recipe, sensitivities
from kvpass.calibration.codebook import CodebookSamples
from kvpass.calibration.observe import ModelRunner
from kvpass.calibration.samples import GradientSample
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError, PlanError
from kvpass.format.quantize import fake_quantize
from tests.harness import compiled, graphs_compiled, run_steps
from tests.models import prompt, tiny_model
from tests.strategies import randn
from tests.tolerances import LOGITS_CODE_FLIP, LOGITS_CODES_FP32

IDS = [prompt(1, 60, seed=i) for i in range(4)]


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("batches", [[40], [7, 30, 3]])
def test_thresholds_are_percentiles(fraction: float, batches: list[int]) -> None:
    """Section 3.4: of every channel, over all tokens but the first of each text."""
    skip, texts = 2, [randn(2, 3, n, 8, seed=n) for n in batches]
    count = sum(2 * (n - skip) for n in batches)
    found = Thresholds(fraction, count, skip)
    for x in texts:
        found.add(x)
    every = np.concatenate([x[:, :, skip:].permute(1, 3, 0, 2).flatten(2) for x in texts], axis=2)
    for got, place in zip(found.bounds(), (fraction / 2, 1 - fraction / 2), strict=True):
        wanted = np.quantile(every, place, axis=2)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks_are_weighted_k_means(bits: int) -> None:
    """Section 3.3, eq. 3: of all values, weighted by their squared gradients."""
    generator = np.random.default_rng(0)
    x = np.tanh(generator.normal(size=4000) * 0.7)
    weights = generator.exponential(size=4000)
    apart = generator.random(4000) < 0.02
    samples = CodebookSamples()
    for part in np.array_split(np.arange(4000), 3):
        arguments = (torch.from_numpy(a[part]) for a in (x, weights, ~apart))
        samples.add(*arguments)
    codebook = samples.codebook(bits, seed=0)
    means = KMeans(2**bits, n_init=10, random_state=0)
    means.fit(x[~apart].reshape(-1, 1), sample_weight=weights[~apart])

    def loss(centres: Any) -> float:
        distance = np.abs(x[~apart][:, None] - np.asarray(centres)).min(1)
        return float((weights[~apart] * distance**2).sum())

    assert list(codebook) == sorted(codebook)
    assert loss(codebook) <= 1.02 * loss(means.cluster_centers_.flatten())
    nearest = np.abs(x[~apart][:, None] - np.asarray(codebook)).argmin(1)
    rounded = np.asarray(codebook)[nearest]
    factor, offset = samples.qnorm(codebook)
    moved = rounded * factor + offset
    assert moved.mean() == pytest.approx(x[~apart].mean(), abs=1e-3)
    assert moved.std() == pytest.approx(x[~apart].std(), rel=1e-3)


def test_codebooks_of_few_values_are_even() -> None:
    samples = CodebookSamples()
    samples.add(torch.zeros(5), torch.ones(5), torch.ones(5, dtype=torch.bool))
    assert samples.codebook(2, 0) == pytest.approx((-1, -1 / 3, 1 / 3, 1))
    assert samples.qnorm(samples.codebook(2, 0)) == (1, 0), "all of them have one value"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_those_of_autograd(family: str) -> None:
    """Of keys in front of their rotary embedding, and of values, in every layer."""
    model = tiny_model(family)
    samples: dict[tuple[str, str], GradientSample] = {}
    torch._dynamo.reset()
    runner = ModelRunner(model, IDS[:1], progress=False)
    runner.gradients(lambda s: samples.update({(s.layer, s.kind): s}), "test")
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert len(samples) == 6
    projected: dict[tuple[str, str], torch.Tensor] = {}

    def keep(layer: str, kind: str, out: torch.Tensor) -> None:
        out.retain_grad()
        projected[layer, kind] = out

    for i in range(2):
        if family == "llama":
            attention = model.model.layers[i].self_attn
            for kind, module in (("before_rope", attention.k_proj), ("values", attention.v_proj)):
                path = f"model.layers.{i}.self_attn"
                module.register_forward_hook(lambda _, __, out, p=path, k=kind: keep(p, k, out))
        else:
            module = model.transformer.h[i].attn.c_attn
            path = f"transformer.h.{i}.attn"
            module.register_forward_hook(lambda _, __, out, p=path: keep(p, "all", out))
    logits = model(IDS[0]).logits
    cross_entropy(logits[0, :-1], IDS[0][0, 1:], reduction="sum").backward()
    for (layer, kind), out in projected.items():
        assert out.grad is not None
        # [B, T, 3, H, D] in GPT-2, of queries, keys and values.
        kinds = ("before_rope", "values") if kind == "all" else (kind,)
        for name in kinds:
            both = [out, out.grad]
            if kind == "all":
                both = [x.unflatten(-1, (3, -1))[..., 1 + (name == "values"), :] for x in both]
            got = samples[layer, name]
            for wanted, x in zip(both, (got.x, got.gradient), strict=True):
                flat = x.transpose(1, 2).flatten(2)
                torch.testing.assert_close(flat, wanted, rtol=1e-4, atol=1e-5)


def plan_for(model: Any, name: str, **fields: Any) -> Plan:
    torch._dynamo.reset()
    fields = {"window": 0, "sinks": 1} | fields
    return calibrate(model, name, IDS, progress=False, batch=2, **fields)


def flipping_error(model: Any, plan: Plan, steps: list[int], batch: int = 1) -> float:
    """How far a compiled model is from its oracle."""
    torch._dynamo.reset()
    ids = prompt(batch, sum(steps), seed=9)
    got, packed = run_steps(compiled(model, plan, strict=True), ids, steps)
    cache = oracle_cache(plan, model.config, model)
    wanted, _ = run_steps(model, ids, steps, None, cache)
    plain, _ = run_steps(model, ids, steps)
    assert (plain - wanted).abs().max() > 10 * LOGITS_CODE_FLIP, "nothing was rounded"
    for layer in packed.layers:
        assert isinstance(layer.keys, PackedKV)
        assert isinstance(layer.values, PackedKV)
    return float((got - wanted).abs().max())


CASES = [
    ("llama", "kvquant-nuq3-1%", {}),
    ("llama", "kvquant-nuq2", {"window": 6}),
    ("llama", "kvquant-nuq4", {"before_rope": False, "value_bits": 2}),
    ("llama", "kvquant-nuq3-1%", {"uniform": True}),
    ("glm4", "kvquant-nuq4-1%", {}),
    ("gpt2", "kvquant-nuq3-1%", {}),
]


@pytest.mark.parametrize(("family", "name", "fields"), CASES, ids=str)
def test_compiled_equals_the_oracle(family: str, name: str, fields: dict[str, Any]) -> None:
    model = tiny_model(family, layers=1)
    before = copy.deepcopy(model.state_dict())
    plan = plan_for(model, name, **fields)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    # Every further kind of step is a graph to compile.
    steps = [30, 1, 1, 5, 1, 33, 1, 1] if (family, fields) == ("llama", {}) else [30, *[1] * 6]
    assert flipping_error(model, plan, steps, batch=2) <= LOGITS_CODE_FLIP


def test_plans_are_saved_and_equal_seeds_make_equal_ones(tmp_path: Any) -> None:
    model = tiny_model("llama", layers=1)
    plan = plan_for(model, "kvquant-nuq2-1%")
    assert plan_for(model, "kvquant-nuq2-1%") == plan
    plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors") == plan
    (layer,) = plan.layers.values()
    assert layer.before_rope
    assert layer.keys.codec.qnorm is not None
    assert layer.values.codec.outliers == layer.keys.codec.outliers == 2
    assert layer.values.codec.group == 32


def test_two_graphs_serve_a_generation() -> None:
    model = tiny_model("llama")
    plan = plan_for(model, "kvquant-nuq3-1%")
    twin = compiled(model, plan)
    torch._dynamo.reset()
    count = graphs_compiled()
    with torch.no_grad():
        twin.generate(prompt(1, 30), max_new_tokens=200, do_sample=False, eos_token_id=None)
    assert graphs_compiled() - count == 2


def test_inductor_equals_op_by_op() -> None:
    model = tiny_model("llama", layers=1)
    plan = plan_for(model, "kvquant-nuq3-1%")
    ids, steps = prompt(1, 40), [30, *[1] * 10]
    wanted, _ = run_steps(compiled(model, plan), ids, steps)
    got, _ = run_steps(compiled(model, plan, "inductor"), ids, steps)
    assert (got - wanted).abs().max().item() <= LOGITS_CODES_FP32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 5}, "bits=5 is not supported; allowed: 2, 3, 4"),
        ({"outliers": 0.7}, "outliers=0.7 is not supported; allowed: a fraction"),
        ({"uniform": 1}, "uniform=1 is not supported"),
        ({"qnorm": True, "uniform": True}, "qnorm=True is not supported with uniform=True"),
        ({"sinks": -1}, "sinks=-1 is not supported"),
    ],
)
def test_fields_that_are_not_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        recipe("kvquant-nuq3", **fields)


def test_the_last_and_the_first_tokens_stay_exact() -> None:
    """The paper's setting is another; names say what differs."""
    assert (recipe("kvquant-nuq2").window, recipe("kvquant-nuq2").sinks) == (128, 5)
    model = tiny_model("llama", layers=1)
    texts = [prompt(1, 200, seed=i) for i in range(2)]
    plan = calibrate(model, "kvquant-nuq3", texts, progress=False, key_bits=2)
    (layer,) = plan.layers.values()
    assert layer.keys.retention == layer.values.retention == RetentionPolicy(128, 1, 5)
    assert [len(x.codec.codebook or ()) for x in (layer.keys, layer.values)] == [4, 8]
    assert layer.keys.codec.qnorm is not None
    assert layer.values.codec.qnorm is None
    assert plan.recipe == "kvquant-nuq-k2v3"


def test_without_calibration_it_is_one_sentence() -> None:
    with pytest.raises(PlanError, match=r"Recipe 'kvquant-nuq2-1%' is calibrated: use the plan"):
        recipe("kvquant-nuq2-1%").plan(tiny_model("llama", layers=1).config)


def test_models_that_rotate_keys_in_another_way_are_refused() -> None:
    with pytest.raises(PlanError, match=r"before their rotary embedding: .* follows"):
        plan_for(tiny_model("hunyuan_v1_dense", layers=1), "kvquant-nuq3")


def test_sensitivity_is_the_error_weighted_by_gradients() -> None:
    """Appendix P, by hand: per layer, and less with more bits."""
    model = tiny_model("llama")
    plan = plan_for(model, "kvquant-nuq2")
    found = sensitivities(model, plan, IDS, batch=2, progress=False)
    assert list(found) == list(plan.layers)
    wanted = dict.fromkeys(found, 0.0)
    torch._dynamo.reset()

    def add(sample: GradientSample) -> None:
        layer = plan.layer(sample.layer)
        if sample.kind == "values":
            error = sample.x - fake_quantize(layer.values.codec, sample.x)
            # The first token stays exact.
            error[:, :, :1] = 0
            wanted[sample.layer] += float((error * sample.gradient).square().sum()) / 240

    ModelRunner(model, IDS, progress=False).gradients(add, "test")
    assert [s.values for s in found.values()] == pytest.approx(list(wanted.values()), rel=1e-4)
    fine = sensitivities(model, plan_for(model, "kvquant-nuq4"), IDS, progress=False)
    for name, score in found.items():
        assert 0 < fine[name].keys < score.keys
        assert 0 < fine[name].values < score.values
    uniform = recipe("kivi-2bit", group=4, residual=16).plan(model.config)
    assert all(s.keys > 0 for s in sensitivities(model, uniform, IDS, progress=False).values())


def test_a_compiled_model_is_refused() -> None:
    model = tiny_model("llama", layers=1)
    plan = recipe("kivi-2bit").plan(model.config)
    with pytest.raises(OptionError, match="compiled already"):
        sensitivities(compiled(model, "fp"), plan, IDS)
