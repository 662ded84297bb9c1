"""The arithmetic is what caches really hold."""

from __future__ import annotations

import pytest
import torch

from kvpass.bench import memory
from kvpass.bench.memory import bench_memory, cache_bytes, memory_section, parse_bytes
from kvpass.bench.models import CacheShape
from kvpass.errors import OptionError
from kvpass.recipes import recipe

SHAPE = CacheShape(layers=3, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("name", ["fp", "kivi-4bit", "kivi-2bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 127, 128, 400, 1025])
def test_arithmetic_is_what_is_held(name, dtype, tokens):
    plan = recipe(name).layer_plan("*", 64, 64)
    computed = cache_bytes(plan, SHAPE, 2, tokens, dtype)
    assert computed == cache_bytes(plan, SHAPE, 2, tokens, dtype, torch.device("cpu"))


def test_the_largest_that_fits():
    budget = 20 << 20
    plain, packed = bench_memory(SHAPE, ["kivi-2bit"], budget, 2, 1000, torch.bfloat16)
    assert (plain.context, plain.batch) == (budget // (3 * 2 * 2 * 2 * 64 * 2), budget // 1536000)
    plan = recipe("kivi-2bit").layer_plan("*", 64, 64)
    assert cache_bytes(plan, SHAPE, 2, packed.context, torch.bfloat16) <= budget
    assert cache_bytes(plan, SHAPE, 2, packed.context + 1, torch.bfloat16) > budget
    assert cache_bytes(plan, SHAPE, packed.batch, 1000, torch.bfloat16) <= budget
    assert cache_bytes(plan, SHAPE, packed.batch + 1, 1000, torch.bfloat16) > budget
    assert packed.context > 4 * plain.context
    assert packed.error == 0


def test_wrong_arithmetic_is_reported(monkeypatch):
    real = memory.cache_bytes

    def less(*args):
        held = len(args) == 6
        return real(*args) - (0 if held else 2)

    monkeypatch.setattr(memory, "cache_bytes", less)
    fits = bench_memory(SHAPE, ["kivi-4bit"], 1 << 20, 1, 10, torch.float16)
    assert fits[1].error == 2
    assert "WRONG: a real cache differs by 2 bytes" in str(memory_section(fits, "t"))


def test_nothing_fits():
    plain, packed = bench_memory(SHAPE, ["kivi-4bit"], 100, 1, 10, torch.float16)
    assert (plain.context, packed.context, packed.batch) == (0, 0, 0)


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
