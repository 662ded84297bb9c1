"""What fits a device, what a step reads, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kvpass.errors import OptionError
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.devices import DEVICES, Device, known_device, parse_bytes
from kvpass.estimate.estimate import Estimate, Setting, break_even, estimate
from kvpass.estimate.links import Link, gathered, known_link
from kvpass.estimate.report import estimate_json, estimate_section
from kvpass.estimate.shapes import model_shape
from kvpass.format.shard import Shard
from kvpass.recipes import written_recipe
from kvpass.zoo.families import tiny_config
from tests.estimate.test_cache import LAYER, model_of
from tests.models import tiny_model

DTYPE = torch.bfloat16
TWO_LAYERS = tiny_model("llama", num_key_value_heads=4, head_dim=64).config


def setting(memory: int = 1 << 24, **more) -> Setting:
    device = Device("small", memory, bandwidth=1e9, flops=1e12)
    return Setting(TWO_LAYERS, device, **{"context": 1000, **more})


def test_the_largest_that_fits():
    plain, fp8, packed = estimate(setting(batch=2), ["kivi-2bit"])
    shape = model_shape(TWO_LAYERS, DTYPE)
    budget, token = (1 << 24) - shape.weights, 2 * 2 * 4 * 64
    assert (plain.context, plain.batch) == (budget // (2 * 2 * token), budget // (1000 * 2 * token))
    assert (fp8.context, fp8.batch) == (budget // (2 * token), budget // (1000 * token))
    cache = ModelCache.packed(shape, written_recipe("kivi-2bit"), DTYPE)
    assert cache.nbytes(2, packed.context) <= budget < cache.nbytes(2, packed.context + 1)
    assert cache.nbytes(packed.batch, 1000) <= budget < cache.nbytes(packed.batch + 1, 1000)
    assert packed.held == cache.nbytes(2, 1000)
    assert packed.context > 4 * plain.context


def test_nothing_fits_and_anything_does():
    assert [(e.context, e.batch) for e in estimate(setting(memory=1000), ["kivi-4bit"])] == [
        (0, 0)
    ] * 3
    # A window slides in every layer.
    config = tiny_config("mistral")
    (plain, _) = estimate(Setting(config, known_device("l4")), [])
    assert (plain.context, plain.below_fp8, plain.bits) == (None, None, 16)
    assert plain.held > 0


@pytest.mark.parametrize("name", ["kivi-4bit", "kivi-2bit", "skvq-k2v2", "kvmix,exact=fraction"])
def test_break_even(name):
    """From there on the cache is always smaller, and not before."""
    shape = model_of(LAYER)
    cache = ModelCache.packed(shape, written_recipe(name), DTYPE)
    for other in (ModelCache.plain(shape, DTYPE), ModelCache.plain(shape, torch.float8_e4m3fn)):
        first = break_even(cache, other, 2)
        assert cache.nbytes(2, first - 1) >= other.nbytes(2, first - 1)
        later = [*range(first, first + 300), 10**4, 10**6]
        assert all(cache.nbytes(2, n) < other.nbytes(2, n) for n in later)
    assert break_even(ModelCache.plain(shape, DTYPE), other, 2) is None


def test_a_step_reads_weights_and_cache():
    plain, fp8 = estimate(setting(batch=4, efficiency=0.5), [])
    shape = model_shape(TWO_LAYERS, DTYPE)
    embedding = TWO_LAYERS.vocab_size * TWO_LAYERS.hidden_size
    # The head is another matrix than the embedding, of which a step reads a few rows.
    assert shape.read_weights(4) == shape.weights - 2 * embedding
    cached = 4 * 1000 * 2 * 2 * 4 * 64 * 2
    assert plain.read == shape.read_weights(4) + cached
    assert fp8.read == shape.read_weights(4) + cached / 2
    assert plain.ms == pytest.approx(1e3 * plain.read / 1e9 / 0.5)
    assert plain.tokens_per_s == pytest.approx(4e3 / plain.ms)
    tied = type(TWO_LAYERS)(**TWO_LAYERS.to_dict() | {"tie_word_embeddings": True})
    assert model_shape(tied, DTYPE).read_weights(4) == shape.read_weights(4)


def test_many_sequences_are_bound_by_operations():
    device = Device("slow", 1 << 30, bandwidth=1e9, flops=1e9)
    (plain, _) = estimate(Setting(TWO_LAYERS, device, batch=64, context=1, efficiency=1.0), [])
    shape = model_shape(TWO_LAYERS, DTYPE)
    operations = 2 * 64 * (shape.matrices + 2 * 4 * 128)
    assert plain.compute_bound
    assert plain.ms == pytest.approx(1e3 * operations / 1e9)


def test_experts_are_read_as_far_as_they_are_chosen():
    config = tiny_config("mixtral")
    shape = model_shape(config, DTYPE)
    assert shape.share == config.num_experts_per_tok / config.num_local_experts == 0.5
    assert shape.experts == 2 * 4 * 3 * config.hidden_size * config.intermediate_size
    one, two, all_of_them = (shape.read_weights(batch) for batch in (1, 2, 1000))
    assert (two - one) / (2 * shape.experts) == pytest.approx(0.25)
    assert all_of_them == 2 * (shape.matrices + shape.experts)


def test_devices_that_share_sequences():
    link = Link("slow", 1e6, start=1e-3, hop=1e-4)
    names = ["kivi-2bit", "cocktail"]
    alone, shared = (
        estimate(setting(batch=2, devices=n, link=link, context=5000), names) for n in (1, 4)
    )
    shape = model_shape(TWO_LAYERS, DTYPE)
    assert shared[:2] == alone[:2]
    kivi, part = alone[2], shared[2]
    assert (kivi.gathers, kivi.sent, kivi.link_ms) == (0, 0, 0.0)
    # Two layers of 4 query heads of 64 channels; with the first one travels a number more.
    sent = [2 * 4 * 4 * (64 + 2), 2 * 4 * 4 * (64 + 1)]
    assert (part.gathers, part.sent) == (2, sum(sent))
    assert part.link_ms == pytest.approx(sum(1 + 3 * (0.1 + n / 1e3) for n in sent))
    cache = ModelCache.packed(shape, written_recipe("kivi-2bit"), DTYPE, Shard(0, 4, "0"))
    assert part.held == cache.nbytes(2, 5000) < kivi.held / 2
    assert part.ms - part.link_ms == pytest.approx(1e3 * part.read / 1e9 / 0.8)
    assert part.read - shape.read_weights(2) < (kivi.read - shape.read_weights(2)) / 2
    attention = shape.flops(2, 5000) - shape.flops(2, 0)
    own = shape.flops(2, 5120, Shard(0, 4, "0")) - shape.flops(2, 0)
    assert 5000 * own == attention * 1280
    table = str(estimate_section(setting(devices=4, link=link), shared))
    assert "1,000 tokens, on each of 4 devices that share the sequences" in table
    assert "slow: 0.001 GB/s; each layer's gather takes 1000 us, and 100 us in each of 3" in table
    assert f"{part.sent / 2e3:.2f}" in table
    assert part.layer == 2 * 5000 * 2 * 4 * 64 * 2
    assert "in parts needs at least 0.010 GB beside the cache on each" in table
    assert "cocktail" in table


def test_decoded_latents_are_sent_whole():
    shape, shard = model_of(replace(LAYER, latents=True, heads=1)), Shard(0, 4, "0")
    assert gathered(shape, 3, 1000, DTYPE, shard) == [3 * 256 * 64 * 2] * 2


def test_table_and_rows():
    found = estimate(setting(), ["cocktail", "kvmix", "kivi-2bit,group=48,residual=96"])
    table = str(estimate_section(setting(), found))
    assert "Predicted: llama in bfloat16 on small, batch 1, 1,000 tokens" in table
    assert "small: 0.0167772 GB, 1 GB/s and 1 TFLOP/s (given by hand)" in table
    assert "of which a step reaches 80%" in table
    assert "Weights: 0.000" in table
    assert "not possible: The values of layer '0' cannot be stored as int2.token48" in table
    assert "cocktail: 88% of the chunks in the fewest bits" in table
    rows = json.loads(json.dumps(estimate_json(setting(), found)))
    assert [row["name"] for row in rows][:3] == ["plain", "fp8", "cocktail"]
    assert rows[0]["at_context"] == 1000
    assert Estimate(**{name: rows[0][name] for name in vars(found[0])}).held == found[0].held


def test_options():
    with pytest.raises(OptionError, match=r"Unknown device 'h1000'\. Did you mean 'h100'"):
        known_device("h1000")
    with pytest.raises(OptionError, match="batch=0 is not supported"):
        setting(batch=0)
    with pytest.raises(OptionError, match="efficiency=2 is not supported"):
        setting(efficiency=2)
    with pytest.raises(OptionError, match="is not supported; allowed: torch"):
        setting(dtype=torch.float32)
    with pytest.raises(OptionError, match="bandwidth=0 is not supported"):
        Device("mine", 1 << 30, 0)
    with pytest.raises(OptionError, match=r"Unknown link 'nvlink'\. Did you mean 'nvlink"):
        known_link("nvlink")
    with pytest.raises(OptionError, match="devices=0 is not supported"):
        setting(devices=0)
    with pytest.raises(OptionError, match="link bandwidth=0 is not supported"):
        Link("mine", 0, 0)
    with pytest.raises(OptionError, match="Unknown recipe 'kivi-3bit'"):
        estimate(setting(), ["kivi-3bit"])
    assert all(0.5e12 < d.flops / d.bandwidth * 1e10 < 5e12 for d in DEVICES.values())


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 << 30), ("80G", 80 * 10**9), ("1.5 kib", 1536), ("7", 7), ("3TB", 3 * 10**12)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "16X", "-1G", "1I"])
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(OptionError, match="cannot be read; allowed"):
        parse_bytes(text)
