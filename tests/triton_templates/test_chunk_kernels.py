"""Kernels for chunks of different bits in Triton's interpreter against the reference ops: bit for
bit where they store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvpass.cocktail import use
from kvpass.cocktail.placement import ChunkFormat, place
from kvpass.format.parse import parse_plan
from kvpass.ops import logical
from lowering.triton import chunks
from tests.cocktail.requests import any_bits, check_attention, widened
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import (
    NAN_PARAMS,
    POISON_WORD,
    keys_like,
)

pytestmark = pytest.mark.interpreter

ops = torch.ops.kvpass
KEYS = "int2.channel16.clip0.8|int4.channel16|fp/chunk=16"
VALUES = "int2.token32|int4.token32|fp/chunk=16"
PROMPT, LATER, STEP = 300, 70, 3


def extended(handle, new: torch.Tensor, seed: int, extend=ops.extend_chunks):
    """The handle after a later prompt."""
    plan = handle.plan
    with use(any_bits(new.shape[0], new.shape[2], seed, chunk=16)):
        placed = place([handle], ChunkFormat.of([plan]), *new.shape[::2], new.device)
    reason = chunks.unsupported_extend(handle.own, new, placed.scatter_index, str(plan))
    assert reason is None
    extend(handle.own, new, placed.scatter_index, str(plan))
    return placed.extended(handle.extended(new.shape[2]))


def first_prompt(plan: str, x: torch.Tensor):
    with use(any_bits(x.shape[0], PROMPT, 1, chunk=16)):
        return logical.reorder_chunks(None, x[:, :, :PROMPT].contiguous(), plan)


def handle_of(plan: str, x: torch.Tensor):
    """Of a prompt, another one and a step."""
    handle = extended(first_prompt(plan, x), x[:, :, PROMPT : PROMPT + LATER], 2)
    return logical.append(handle, x[:, :, PROMPT + LATER :], plan)


def poison(handle) -> list[torch.Tensor]:
    """The state, poisoned where no token lives."""
    plan, state = handle.plan, handle.named
    for segment in range(len(plan.codecs)):
        for name in plan.segment_fields(segment):
            field, tensor = plan.layout[name], state[name]
            value = NAN_PARAMS.get(tensor.dtype, torch.nan if field.exact else POISON_WORD)
            for row, end in enumerate(handle.segment_ends[:, segment].tolist()):
                dead = field.room(tensor) - end // field.group * field.group
                field.tokens(tensor[row : row + 1], end // field.group * field.group, dead).fill_(
                    value
                )
    return handle.state


def live(handle, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What tokens live in, of such a state without positions."""
    plan, found = handle.plan, [handle.segment_ends]
    named = dict(zip(plan.layout.names, tensors, strict=False))
    for segment in range(len(plan.codecs)):
        for name in plan.segment_fields(segment):
            field = plan.layout[name]
            for row, end in enumerate(named["segment_ends"][:, segment].tolist()):
                found.append(field.tokens(named[name][row : row + 1], 0, end))
    return found


def same(handle, got: Sequence[torch.Tensor]) -> None:
    for a, b in zip(live(handle, got), live(handle, handle.own), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("batch", "groups", "queries", "dtype", "masked"),
    [
        (1, 1, 1, torch.bfloat16, False),
        (2, 4, STEP, torch.float16, True),
        (2, 2, STEP, torch.float32, True),
    ],
    ids=["one", "heads", "fp32"],
)
def test_attention(batch: int, groups: int, queries: int, dtype: torch.dtype, masked: bool) -> None:
    tokens = PROMPT + LATER + STEP
    x, y = (keys_like(batch, 2, tokens, 64, dtype, seed) for seed in (0, 1))
    keys, values = poison(handle_of(KEYS, x)), poison(handle_of(VALUES, y))
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(batch, 2 * groups, queries, 64, generator=generator).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(batch, 1, queries, tokens, generator=generator) > 0.5
        mask[..., -STEP:] = True
    check_attention(chunks, (KEYS, VALUES), (keys, values), q, mask, TRITON_ATTENTION[dtype])


@pytest.mark.parametrize("plan", [KEYS, VALUES])
def test_prompts_steps_and_unpack(plan: str) -> None:
    x = keys_like(2, 2, PROMPT + LATER + STEP, 64, torch.float16, 0)
    p, prompt = parse_plan(plan), x[:, :, :PROMPT]
    first = first_prompt(plan, x)
    index = [getattr(first, name).view(2, -1, p.tile) for name in p.chunk_positions]
    assert chunks.unsupported_reorder(prompt, index, plan) is None
    same(first, chunks.reorder_chunks(prompt, index, plan))

    theirs, ours = first.clone(), first.clone()
    later, step = x[:, :, PROMPT:].split([LATER, STEP], dim=2)
    theirs, ours = extended(theirs, later, 2), extended(ours, later, 2, chunks.extend_chunks)
    same(theirs, ours.own)

    assert chunks.unsupported_append(ours.own, step, plan) is None
    chunks.append_chunks(ours.own, step, plan)
    ops.append_chunks(theirs.own, step, plan)
    same(theirs, ours.own)

    arguments = (PROMPT + LATER + STEP, plan, x.dtype)
    state = poison(theirs)
    assert chunks.unsupported_unpack(state, *arguments) is None
    assert torch.equal(
        chunks.unpack_chunks(state, *arguments), ops.unpack_chunks(state, *arguments)
    )


def test_a_step_appends_attends_and_moves_the_ends() -> None:
    tokens = PROMPT + LATER + STEP
    x, y = (keys_like(2, 2, tokens, 64, torch.float16, seed) for seed in (0, 1))
    got, wanted, new = [], [], []
    for plan, z in ((KEYS, x), (VALUES, y)):
        handle = extended(first_prompt(plan, z), z[:, :, PROMPT : PROMPT + LATER], 2)
        got.append(poison(handle))
        wanted.append(handle.clone())
        new.append(z[:, :, PROMPT + LATER :])
    rotation = keys_like(1, 1, STEP, 64, torch.float16, 3)[:, 0], "halves0-64"
    ops.append_chunks(wanted[0].own, new[0], KEYS, *rotation)
    ops.append_chunks(wanted[1].own, new[1], VALUES)
    q = keys_like(2, 4, STEP, 64, torch.float16, 4)
    rest = (None, 0.125, KEYS, VALUES, None, True)
    arguments = (*new, *rotation, *[None] * 3, q, *got, *rest)
    assert chunks.unsupported_step(*arguments) is None
    out = chunks.append_attention_chunks(*arguments).double()
    for handle, state in zip(wanted, got, strict=True):
        same(handle, state)
    wide = [widened(handle.state, q.dtype) for handle in wanted]
    exact = ops.attention_chunks(q.double(), *wide, *rest)
    assert ((out - exact).norm() / exact.norm()).item() <= TRITON_ATTENTION[torch.float16]


def test_declined() -> None:
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16)
    states = []
    for plan in ("fp|int4.token16|fp/chunk=16", VALUES):
        with use(any_bits(1, 64, 0, (16,), chunk=16)):
            states.append((logical.reorder_chunks(None, x, plan).state, plan))
    (odd, exact), (even, values) = states
    q = torch.zeros(1, 2, 1, 64, dtype=torch.float16)
    reason = chunks.unsupported_attention(q, odd, even, None, 1.0, exact, values)
    assert reason == f"a segment of {exact} and {values} is exact in one of them only"
    reason = chunks.unsupported_attention(q, even, even, None, 1.0, values, values, None, False, 8)
    assert reason == "a window of 8 tokens that lie in the order of their bits"
