"""C++ for chunks of different bits: the same as the reference, bit for bit where it stores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvpass.cocktail import use
from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from lowering.cpp import chunks
from tests.cocktail.requests import any_bits, check_attention
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import keys_like

ops = torch.ops.kvpass
KEYS = "int2.channel8|int4.channel8|fp/chunk=8"
VALUES = "int2.token16|int4.token16|fp/chunk=8"
PROMPT, LATER, STEP = 300, 40, 5


def state_of(plan: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Of a prompt, another one and a step; what no token lives in is poisoned."""
    split = (PROMPT, LATER, STEP)
    with use(any_bits(x.shape[0], PROMPT, 1)):
        handle = logical.reorder_chunks(None, x[:, :, :PROMPT].contiguous(), plan)
    with use(any_bits(x.shape[0], LATER, 2)):
        handle = logical.reorder_chunks(handle, x[:, :, PROMPT : PROMPT + LATER], plan)
    handle = logical.append(handle, x[:, :, sum(split[:2]) :], plan)
    codes = handle.codes
    for row, ends in enumerate(handle.segment_ends.tolist()):
        codes[row, :, ends[-1] :] = torch.nan
    return handle.state


@pytest.mark.parametrize(
    ("batch", "groups", "queries", "dim", "dtype", "masked"),
    [
        (1, 1, 1, 64, torch.bfloat16, False),
        (3, 4, 1, 32, torch.float32, True),
        (2, 4, STEP, 32, torch.float32, True),
    ],
    ids=["one", "heads", "steps"],
)
def test_attention(
    batch: int, groups: int, queries: int, dim: int, dtype: torch.dtype, masked: bool
) -> None:
    tokens = PROMPT + LATER + STEP
    x, y = (keys_like(batch, 2, tokens, dim, dtype, seed) for seed in (0, 1))
    keys, values = state_of(KEYS, x), state_of(VALUES, y)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(batch, 2 * groups, queries, dim, generator=generator).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(batch, 1, queries, tokens, generator=generator) > 0.5
        mask[..., -STEP:] = True
    check_attention(chunks, (KEYS, VALUES), (keys, values), q, mask, CPP_ATTENTION[dtype])


def test_matrices_in_tiles(loops: int) -> None:
    """Of many query rows, in bfloat16."""
    test_attention(2, 4, STEP, 64, torch.bfloat16, masked=True)


@pytest.mark.parametrize("plan", [KEYS, VALUES])
def test_prompts_and_steps(plan: str) -> None:
    x = keys_like(2, 2, PROMPT + STEP, 32, torch.float32, 0)
    p = parse_plan(plan)
    first, step = x[:, :, :PROMPT].contiguous(), x[:, :, PROMPT:].contiguous()
    with use(any_bits(2, PROMPT, 4)):
        handle = logical.reorder_chunks(None, first, plan)
    slots = [getattr(handle, name).view(2, -1, p.tile) for name in p.chunk_positions]
    assert chunks.unsupported_reorder(first, slots, plan) is None
    same(chunks.reorder_chunks(first, slots, plan), handle.own)
    ours, theirs = handle.clone(), handle.clone()
    assert chunks.unsupported_append(ours.own, step, plan) is None
    chunks.append_chunks(ours.own, step, plan)
    ops.append_chunks(theirs.own, step, plan)
    same(ours.own, theirs.own)


def same(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_declined() -> None:
    x = torch.zeros(1, 2, 64, 32)
    states = []
    for plan in ("fp|int4.token16|fp/chunk=8", VALUES):
        with use(any_bits(1, 64, 0, (16,))):
            states.append((logical.reorder_chunks(None, x, plan).state, plan))
    (odd, exact), (even, values) = states
    q = torch.zeros(1, 2, 1, 32)
    reason = chunks.unsupported_attention(q, odd, odd, None, 1.0, exact, exact)
    assert reason == f"a segment of {exact} and {exact} is stored as it is"
    reason = chunks.unsupported_attention(q, even, even, None, 1.0, values, values, None, False, 8)
    assert reason == "a window of 8 tokens that lie in the order of their bits"
