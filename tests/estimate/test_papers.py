"""Figures of the papers, within 5%, as far as they state the setting."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvpass.bench.models import Shape
from kvpass.estimate.cache import ModelCache
from kvpass.estimate.devices import known_device
from kvpass.estimate.estimate import Setting, estimate
from kvpass.estimate.shapes import ModelShape, model_shape
from kvpass.format.codec import Codec
from kvpass.format.shard import Shard
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes import written_recipe

GIB = 1 << 30
LLAMA = {
    "7B": Shape(32, 4096, 11008, 32, 32, 128, 32000),
    "13B": Shape(40, 5120, 13824, 40, 40, 128, 32000),
    "30B": Shape(60, 6656, 17920, 52, 52, 128, 32000),
    "65B": Shape(80, 8192, 22016, 64, 64, 128, 32000),
}
# KVQuant, table 1, batch 1 and 4: GiB of 16-bit weights, and of the 16-bit cache at 32K, 128K, 1M
# (2^15, 2^17, 2^20 tokens) and 10M (1e7 tokens), and of 2 bits at 10M.
TABLE_1 = {
    (1, "7B"): (12.6, 16, 64, 512, 4883, 610),
    (1, "13B"): (24.1, 25, 100, 800, 7629, 954),
    (1, "30B"): (60.3, 49, 195, 1560, 14877, 1860),
    (1, "65B"): (121.1, 80, 320, 2560, 24414, 3052),
    (4, "7B"): (12.6, 64, 256, 2048, 19531, 2441),
    (4, "13B"): (24.1, 100, 400, 3200, 30518, 3815),
    (4, "30B"): (60.3, 195, 780, 6240, 59509, 7439),
    (4, "65B"): (121.1, 320, 1280, 10240, 97656, 12207),
}
LENGTHS = (1 << 15, 1 << 17, 1 << 20, 10**7)
# KVQuant, table 2, "KV Cache (GB)": GiB at 128K; LLaMA-7B, 13B, 30B, 65B.
TABLE_2 = {
    "nuq4": (16.0, 25.0, 48.8, 80.0),
    "nuq4-1%": (17.3, 27.0, 52.7, 86.5),
    "nuq3": (12.0, 18.8, 36.6, 60.0),
    "nuq3-1%": (13.3, 20.8, 40.5, 66.5),
    "nuq2": (8.0, 12.5, 24.4, 40.0),
    "nuq2-1%": (9.3, 14.5, 28.3, 46.5),
}
# KVQuant, table 6: GiB at 128K, 1M and 10M; LLaMA-7B and 65B.
TABLE_6 = {
    ("7B", "nuq4"): (16.0, 128.1, 1221.9),
    ("7B", "nuq4-1%"): (17.3, 138.4, 1319.6),
    ("7B", "nuq3"): (12.0, 96.1, 916.7),
    ("7B", "nuq3-1%"): (13.3, 106.4, 1014.4),
    ("7B", "nuq2"): (8.0, 64.1, 611.5),
    ("7B", "nuq2-1%"): (9.3, 74.4, 709.2),
    ("65B", "nuq4"): (80.0, 640.3, 6106.5),
    ("65B", "nuq4-1%"): (86.5, 691.5, 6595.0),
    ("65B", "nuq3"): (60.0, 480.3, 4580.6),
    ("65B", "nuq3-1%"): (66.5, 531.5, 5069.1),
    ("65B", "nuq2"): (40.0, 320.3, 3054.7),
    ("65B", "nuq2-1%"): (46.5, 371.5, 3543.3),
}
# SKVQ, table 6, LLaMA-7B on an A100 with 80 GB: batch and length (k: 1000 tokens), then of FP16,
# KV4 and KV2 each "Inference Time" in ms, "Memory Access" and "Memory Consumption" in 1e9 bytes.
SKVQ_6 = {
    (1, 32): ((10.6, 21.6, 29.7), (7.5, 15.3, 17.2), (7, 14.3, 15.1)),
    (1, 128): ((23.1, 47.2, 80.1), (10.8, 22, 29.7), (8.7, 17.8, 21.4)),
    (1, 200): ((32.5, 66.3, 118), (13.3, 27, 39.2), (10, 20.5, 26.1)),
    (64, 32): ((274.1, 559, 1100), (76.6, 156, 282), (43.7, 89.1, 147)),
    (64, 128): ((1100, 2200, 4300), (286.4, 584, 1100), (154.8, 316, 551)),
    (64, 200): ((1700, 3400, 6700), (443, 905, 1700), (238.1, 485, 853)),
    (128, 32): ((541.8, 1100, 2200), (146.8, 299, 550), (81, 165, 282)),
    (128, 128): ((2100, 4400, 8600), (566.4, 1200, 2200), (303.1, 618, 1100)),
    (128, 200): ((3300, 6800, 13400), (881.1, 1800, 3400), (469.7, 958, 1700)),
}
close = lambda x: pytest.approx(x, rel=0.05)  # noqa: E731


@cache
def shape(size: str) -> ModelShape:
    return model_shape(LLAMA[size].config(), torch.float16)


def held(size: str, name: str, batch: int, tokens: int) -> float:
    recipe = written_recipe(f"kvquant-{name},window=0,sinks=1")
    cache = ModelCache.packed(shape(size), recipe, torch.float16)
    return cache.nbytes(batch, tokens) / GIB


@pytest.mark.parametrize(("batch", "size"), TABLE_1)
def test_kvquant_table_1(batch: int, size: str) -> None:
    weights, *plain, packed = TABLE_1[batch, size]
    assert shape(size).weights / GIB == close(weights)
    cache = ModelCache.plain(shape(size), torch.float16)
    found = [cache.nbytes(batch, tokens) / GIB for tokens in LENGTHS]
    assert found == [close(x) for x in plain]
    assert held(size, "nuq2", batch, LENGTHS[-1]) == close(packed)


@pytest.mark.parametrize("name", TABLE_2)
def test_kvquant_table_2(name: str) -> None:
    assert [held(size, name, 1, 1 << 17) for size in LLAMA] == [close(x) for x in TABLE_2[name]]


@pytest.mark.parametrize(("size", "name"), TABLE_6)
def test_kvquant_table_6(size: str, name: str) -> None:
    found = [held(size, name, 1, tokens) for tokens in LENGTHS[1:]]
    assert found == [close(x) for x in TABLE_6[size, name]]


def bare(bits: int) -> Plan:
    """Codes of so many bits with hardly anything beside them, as the table counts them."""
    plan = TensorPlan(Codec(bits, "token", 4096, qparams="fp8"))
    return Plan(LayerPlan(plan, plan))


@pytest.mark.parametrize(("batch", "thousands"), SKVQ_6)
def test_skvq_table_6(batch: int, thousands: int) -> None:
    """Memory is as stated. What a step accesses is there without half of the cache, but with an
    attention output as long as the context, twice: LLM-Viewer, which computed the table, counts
    so where it assumes flash-attention. The times are those bytes at the GPU's bandwidth."""
    device, tokens, llama = known_device("a100-80gb"), 1000 * thousands, shape("7B")
    caches = [ModelCache.plain(llama, torch.float16)]
    caches += [ModelCache.packed(llama, bare(bits), torch.float16) for bits in (4, 2)]
    outputs = 2 * 32 * 32 * 2 * batch * tokens
    for found, (ms, access, memory) in zip(caches, SKVQ_6[batch, thousands], strict=True):
        assert (llama.weights + found.nbytes(batch, tokens)) / 1e9 == close(memory)
        _, cached = found.stored(batch, tokens)
        counted = llama.read_weights(batch) + cached / 2 + outputs
        assert counted / 1e9 == close(access)
        assert 1e3 * counted / device.bandwidth == close(ms)


@pytest.mark.parametrize(("size", "name"), TABLE_6)
def test_a_part_of_kvquant_table_6(size: str, name: str) -> None:
    """Section 4.2: 10 million tokens of LLaMA-7B on 8 GPUs, with nuq2."""
    shard, recipe = Shard(0, 8, "0"), written_recipe(f"kvquant-{name},window=0,sinks=1")
    cache = ModelCache.packed(shape(size), recipe, torch.float16, shard)
    assert 8 * cache.nbytes(1, LENGTHS[-1]) / GIB == close(TABLE_6[size, name][-1])


def test_ten_million_tokens_on_eight_gpus() -> None:
    """Nuq2 alone fills 8 GPUs of 80 GB (2^30 bytes each), so that there the weights must be spread,
    too, which sharding does not: with all of them on each, larger GPUs are needed."""
    names, config = ["kvquant-nuq2,window=0,sinks=1"], LLAMA["7B"].config()
    for name, fits in (("a100-80gb", False), ("h200", True)):
        device = known_device(name)
        *_, found = estimate(Setting(config, device, context=10**7, devices=8), names)
        assert found.context is not None
        assert (found.context >= 10**7) is fits
        assert found.held < 80 * GIB < found.held + found.weights
        # Of each layer, one output for each of 32 heads of 128 channels.
        assert found.sent == 4 * 32 * (32 * (128 + 1) + 1)
        assert found.link_ms < 0.02 * found.ms


def test_skvq_reads_a_million_tokens_on_one_gpu() -> None:
    """SKVQ, section 1: LLaMA-7B, 80 GB; K in 2 and V in 1.5 bits."""
    setting = Setting(LLAMA["7B"].config(), known_device("a100-80gb"), context=1_000_000)
    plain, _, packed = estimate(setting, ["skvq-k2v1.5"])
    assert plain.context is not None
    assert packed.context is not None
    assert plain.context < 200_000 < 1_000_000 < packed.context
