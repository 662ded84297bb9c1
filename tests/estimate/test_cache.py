"""What is estimated of a cache is what real ones hold, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpass import Plan, cocktail
from kvpass.bench.plans import _Random, handle_of, layer_plan, packed_states, random_bits
from kvpass.errors import OptionError, PlanError
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.shapes import LayerShape, ModelShape, model_shape
from kvpass.evaluate import cache_bytes
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.shard import Shard
from kvpass.format.sharded_plan import ShardedPlan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
from kvpass.recipes import RECIPES, written_recipe
from kvpass.tensor.sharded import ShardedKV
from kvpass.tensor.size import held_bytes, stored_bits
from kvpass.zoo import families
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model

HEADS, DIM = 2, 64
RATIOS = ["kvmix,exact=fraction", "kvmix,exact=pivotal,packing=11-per-int32"]


def model_of(*layers: LayerShape, state_bytes: int = 0) -> ModelShape:
    return ModelShape(dict(enumerate(layers)), state_bytes, 4, 1000, 500, 0, 1.0, 2)


LAYER = LayerShape(HEADS, DIM, DIM, rope=DIM)


def real(plan: LayerPlan, batch: int, tokens: int) -> tuple[int, float]:
    """Bytes and bits of a layer's real keys and values."""
    k, v = torch.randn(2, batch, HEADS, tokens, DIM, dtype=torch.bfloat16)
    states = packed_states(plan, k, v)
    if plan.keys.rope is not None:
        # As `generate` has them: positions of each sequence.
        states[0][-1] = states[0][-1].expand(batch, -1, -1)
    pair = zip(states, (plan.keys, plan.values), strict=True)
    keys, values = (handle_of(state, p, tokens, k.dtype) for state, p in pair)
    return keys.nbytes + sum(t.nbytes for t in values.own), stored_bits([keys, values])


@pytest.mark.parametrize("name", [*sorted(set(RECIPES) - {"auto"}), *RATIOS])
def test_every_recipe(name: str) -> None:
    """The plans of calibrated ones are fitted here, those of the estimates are not."""
    k, v = torch.randn(2, 1, HEADS, 48, DIM)
    plan = layer_plan(name, k, v)
    cache = ModelCache.packed(model_of(LAYER), written_recipe(name), torch.bfloat16)
    for batch, tokens in ((1, 3), (2, 400), (1, 1025)):
        bytes_held, bits = real(plan, batch, tokens)
        assert cache.nbytes(batch, tokens) == bytes_held
        assert cache.stored(batch, tokens)[0] == pytest.approx(bits)


@pytest.mark.parametrize("name", ["fp", "kivi-2bit", "skvq-k2v2", "kvquant-nuq3-1%", *RATIOS])
def test_parts_on_several_devices(name: str) -> None:
    """The first device holds what is estimated, and no other one more."""
    k, v = torch.randn(2, 1, HEADS, 48, DIM)
    plan = layer_plan(name, k, v)
    # Their positions are counted in `test_every_recipe`.
    plan = replace(plan, keys=replace(plan.keys, rope=None))
    shape = model_of(replace(LAYER, rope=0))
    x = torch.randn(2, HEADS, 4000, DIM, dtype=torch.bfloat16)
    held = []
    for rank in range(3):
        shard = Shard(rank, 3, "0")
        cache = ModelCache.packed(shape, written_recipe(name), torch.bfloat16, shard)
        handles = [sharded(p, shard, x, plan.key_ranges) for p in (plan.keys, plan.values)]
        held.append(held_bytes(handles))
        assert cache.nbytes(2, 4000) == held[rank]
        parts = [x.part for x in handles]
        assert cache.stored(2, 4000)[0] == pytest.approx(stored_bits(parts))
    whole = ModelCache.packed(shape, written_recipe(name), torch.bfloat16).nbytes(2, 4000)
    assert max(held) == held[0] < whole


def sharded(plan: TensorPlan, shard: Shard, x: torch.Tensor, ranges: Any) -> ShardedKV:
    """The part of a cache tensor that holds ``x`` ``[B, H, T, D]``."""
    part = ShardedPlan.of(plan, shard)
    given = ranges.tensor() if plan.codec.static_ranges else None
    state = torch.ops.kvpass.pack_shard(x, str(part), given)
    return ShardedKV.of_prompt(state, part, x.shape[2], x.dtype)


def test_auto_uses_its_budget() -> None:
    """An allocation may leave some of it."""
    k, v = torch.randn(2, 1, HEADS, 48, DIM)
    auto = written_recipe("auto,budget=3.5")
    fitted = auto.fit(_Random(k, v), seed=0).layers["*"]
    cache = ModelCache.packed(model_of(*[LAYER] * 8), auto, torch.bfloat16)
    assert set(cache.bits) == {3, 4}
    codecs = [kind.plan.codec for kind, n in cache.tensors.items() for _ in range(n)]
    bits = sum(codec.bits_per_element(DIM, HEADS) for codec in codecs) / len(codecs)
    assert 3.4 < bits <= 3.5
    bytes_held, _ = real(replace(fitted, keys=replace(fitted.keys, rope=None)), 1, 4096)
    assert bytes_held <= 1.02 * cache.nbytes(1, 4096) / 8
    with pytest.raises(PlanError, match="cannot be kept: 2 bits"):
        ModelCache.packed(model_of(LAYER), written_recipe("auto,budget=1.0"), torch.bfloat16)


def test_kvmix_counts_layers() -> None:
    cache = ModelCache.packed(model_of(*[LAYER] * 32), written_recipe("kvmix"), torch.bfloat16)
    assert cache.bits == {2: 48, 3: 8, 4: 8}


KIVI = "kivi-2bit,group=16,residual=16"
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: list[tuple[str, dict[str, Any] | None, str, int]] = [
    ("llama", {}, "kivi-2bit,before_rope=true", 300),
    ("gemma3_text", MIXED, KIVI, 100),
    # The exact window is as long as the sliding one, whose layers then stay exact.
    ("gemma3_text", MIXED, "kivi-2bit", 10),
    # From the zoo: latents, recurrent states, and layers that read another one's keys.
    ("deepseek_v2", None, KIVI, 100),
    ("qwen3_next", None, KIVI, 100),
    ("gemma4_text", None, KIVI, 100),
]


@pytest.mark.parametrize(("family", "options", "name", "tokens"), MODELS)
def test_real_models(family: str, options: dict[str, Any] | None, name: str, tokens: int) -> None:
    zoo = options is None
    model = families.tiny_model(family, "eager") if zoo else tiny_model(family, **options)
    shape, dtype = model_shape(model.config, torch.float32), torch.float32
    for way, cache in (
        (model, ModelCache.plain(shape, dtype)),
        (
            compiled(model, written_recipe(name)),
            ModelCache.packed(shape, written_recipe(name), dtype),
        ),
    ):
        options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
        found = way.generate(prompt(2, tokens), **options).past_key_values
        named = [vars(layer) for layer in found.layers]
        kv = [x[n] for x in named for n in ("keys", "values") if x.get(n) is not None]
        states = [x.get(n, {}) for x in named for n in ("conv_states", "recurrent_states")]
        constant = [t for x in states for t in x.values() if t is not None]
        assert cache.nbytes(2, tokens) == held_bytes(kv) + sum(t.nbytes for t in constant)
        assert cache.stored(2, tokens)[0] == pytest.approx(stored_bits(kv))
        assert bool(constant) == (family == "qwen3_next")


def test_chunks_of_a_request() -> None:
    model = tiny_model("llama")
    recipe = written_recipe("cocktail")
    estimated = ModelCache.packed(model_shape(model.config, torch.float32), recipe, torch.float32)
    with cocktail.use(random_bits(recipe.layer_plan("*", 16, 16).keys, 2, 1000)):
        _, cache = run_steps(compiled(model, recipe), prompt(2, 1000), [1000])
    held, bits = cache_bytes(cache)
    assert estimated.nbytes(2, 1000) == held
    assert estimated.stored(2, 1000)[0] == pytest.approx(bits)


def test_plan_files(tmp_path) -> None:
    """Layers by their numbers in paths; a calibrated plan is that of one model."""
    two = TensorPlan(Codec(2, "token", 64), RetentionPolicy(16))
    plan = Plan(layers={"model.layers.1.self_attn": LayerPlan(two, two)})
    plan.save(tmp_path / "a.safetensors")
    shape = model_of(LAYER, LAYER)
    cache = ModelCache.packed(shape, Plan.load(tmp_path / "a.safetensors"), torch.bfloat16)
    assert cache.bits == {2: 2, 16: 2}
    alone = ModelCache.packed(shape, plan, torch.bfloat16)
    assert cache.nbytes(3, 700) == alone.nbytes(3, 700)
    wrong = replace(plan, layers={"0": LayerPlan(two, TensorPlan(Codec(2, "token", 48)))})
    with pytest.raises(PlanError, match="cannot be stored as int2"):
        ModelCache.packed(shape, wrong, torch.bfloat16)


def test_what_a_config_does_not_tell() -> None:
    for family, reason in (("deepseek_v32", "hold indexer_keys"), ("dbrx", "does not run")):
        with pytest.raises(OptionError, match=f"{family} model .*{reason}"):
            model_shape(families.tiny_config(family), torch.bfloat16)
