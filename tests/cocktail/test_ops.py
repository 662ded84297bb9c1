"""Attention knows no order of its tokens: what `reorder_chunks` has put into segments is read as
what it was made of. Any assignment, in the ops that a graph runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import PackedKV
from kvpass.cocktail import use
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import fake_quantize
from kvpass.ops import logical
from tests.cocktail.requests import any_bits
from tests.tolerances import ATTENTION_FP32

EXACT = "fp|fp|fp/chunk=8"
MIXED = ("int2.channel8|int4.channel8|fp/chunk=8", "int2.token16|int4.token16|fp/chunk=8")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(x: torch.Tensor, plan: str, seed: int, first: int | None = None) -> PackedKV:
    """Two prompts, the second behind ``first`` tokens, then one decode step of the rest."""
    labels = parse_plan(plan).chunk_bits
    first = x.shape[2] if first is None else first
    with use(any_bits(x.shape[0], first, seed, labels)):
        handle = logical.reorder_chunks(None, x[:, :, :first], plan)
    rest = x.shape[2] - first
    if rest > 16:
        with use(any_bits(x.shape[0], rest - 3, seed + 1, labels)):
            handle = logical.reorder_chunks(handle, x[:, :, first:-3], plan)
        return logical.append(handle, x[:, :, -3:], plan)
    return logical.append(handle, x[:, :, first:], plan) if rest else handle


@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 90),
    first=st.integers(1, 90),
    queries=st.integers(1, 3),
    masked=st.booleans(),
)
def test_attention_does_not_see_the_order(
    seed: int, batch: int, tokens: int, first: int, queries: int, masked: bool
) -> None:
    tokens, first = max(tokens, queries), min(first, tokens)
    k, v = randn(batch, 2, tokens, 16, seed=seed), randn(batch, 2, tokens, 16, seed=seed + 1)
    q = randn(batch, 4, queries, 16, seed=seed + 2)
    mask = randn(batch, 1, queries, tokens, seed=seed + 3) if masked else None
    variant = (None, queries > 1, 0, 0.0)
    wanted = logical.attention(
        q, logical.append(None, k, "fp"), logical.append(None, v, "fp"), mask, 0.25, *variant
    )
    keys, values = (packed(x, EXACT, seed, first) for x in (k, v))
    assert torch.equal(keys.decode(), k)
    got = logical.attention(q, keys, values, mask, 0.25, *variant)
    assert (got - wanted).abs().max().item() <= ATTENTION_FP32


@given(seed=st.integers(0, 2**20), tokens=st.integers(1, 90), first=st.integers(1, 90))
@pytest.mark.parametrize("plan", MIXED)
def test_chunks_are_rounded_by_the_codecs_of_their_bits(
    plan: str, seed: int, tokens: int, first: int
) -> None:
    """Each chunk on its own, where it stands."""
    first = min(first, tokens)
    p, x = parse_plan(plan), randn(2, 2, tokens, 16, seed=seed)
    handle = packed(x, plan, seed, first)
    wanted, codecs = x.clone(), {c.bits: c for c in p.chunk_codecs}
    later = max(0, tokens - first - 3) if tokens - first > 16 else 0
    for past, new, shift in ((0, first, 0), (first, later, 1)):
        bits = any_bits(2, new, seed + shift, p.chunk_bits)
        for row, (start, asked) in enumerate(zip(bits.starts, bits.bits, strict=True)):
            for i, level in enumerate(asked):
                part = slice(past + start + 8 * i, past + start + 8 * i + 8)
                if level != 16:
                    wanted[row, :, part] = fake_quantize(codecs[level], x[row : row + 1, :, part])[
                        0
                    ]
    assert torch.equal(handle.decode(), wanted)
    assert handle.segment_ends.sum(1).tolist() == [tokens, tokens]
