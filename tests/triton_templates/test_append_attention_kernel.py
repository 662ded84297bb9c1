"""A decode step in Triton's interpreter: one append to keys and values, and attention that moves
the segment ends, against the reference ops one after the other."""

from __future__ import annotations

import pytest
import torch

from kvpass.format.rope import Rope
from kvpass.ops.basis import rotate
from lowering.triton.append_attention import append_attention, unsupported_reason
from lowering.triton.launch import record_launches
from tests.calibrated import PLANS, same_state, states_of
from tests.tolerances import TRITON_ATTENTION
from tests.triton_templates.kernel_reference import (
    dense_attention,
    keys_like,
    kivi,
    poison,
    relative_error,
    states,
)
from tests.triton_templates.test_attention_kernel import query
from tests.triton_templates.test_state_kernels import assert_same

pytestmark = pytest.mark.interpreter

HEADS, DIM = 2, 64
# Keys and values that pack at other times, alike, exactly, in a ring, with sinks, and in a window
# that grows.
CASES = [
    kivi(2),
    ("int2.channel16/window=8,pack_every=32", "int4.token16/window=5,pack_every=1"),
    ("fp", "fp"),
    ("fp", "int2.token64/sinks=5,window=16,pack_every=1"),
    ("int4.channel16/sinks=3,window=0,pack_every=16", "int4.token16/sinks=3,window=9,pack_every=2"),
    ("int4.channel16/window=16,pack_every=16,fraction=0.2",
     "int4.token16/window=4,pack_every=4,pivotal=0.3"),
    ("int4.channel16/window=0,pack_every=16/window_size=64", "int4.token16/window=8,pack_every=1"
     "/window_size=64"),
    ("int4.token128/window=4,pack_every=3", "int2.token64.fp8/window=4,pack_every=1"),
]  # fmt: skip


@pytest.mark.parametrize("plans", CASES, ids=str)
def test_steps(plans):
    """Of one token and of several, over lengths at which tokens become due."""
    rows = Rope.parse("halves0-64")
    keys, values = states(plans, 30, heads=HEADS, steps=(3,))
    for step, n in enumerate((1, 16, 4)):
        new = [keys_like(1, HEADS, n, DIM, torch.float16, 2 * step + i) for i in range(2)]
        rotation = keys_like(1, 1, n, rows.channels, torch.float16, step)[:, 0], str(rows)
        wanted = [[t.clone() for t in state] for state in (keys, values)]
        torch.ops.kvpass.append(wanted[0], new[0], plans[0], *rotation)
        torch.ops.kvpass.append(wanted[1], new[1], plans[1])
        attention = (query(1, 4, n, DIM), None, 0.125, *plans, None, True)
        expected = dense_attention(attention[0], *wanted, *attention[1:])
        arguments = (*new, *rotation, *[None] * 3, attention[0], keys, values, *attention[1:])
        assert unsupported_reason(*arguments) is None
        got = append_attention(*arguments)
        assert relative_error(got, expected) <= TRITON_ATTENTION[torch.float16]
        for state, reference, plan in zip((keys, values), wanted, plans, strict=True):
            assert_same(state, reference, plan)
            poison(state, plan)


@pytest.mark.parametrize("plans", [CASES[4], CASES[6], CASES[7]], ids=str)
def test_a_number_of_tokens_that_varies(plans, monkeypatch):
    """It is an argument of the kernels; the interpreter takes no symbol for it."""
    monkeypatch.setattr("lowering.triton.layouts.symbolic", lambda size: True)
    test_steps(plans)


def test_keys_that_get_their_rotary_embedding_when_they_are_read():
    plans = PLANS["nuq3-1%"]
    keys, values = states_of(plans, 40, torch.float16, 2, dim=DIM)
    own = [state[:-1] if i == 0 else state for i, state in enumerate((keys, values))]
    new = [keys_like(2, HEADS, 1, DIM, torch.float16, i) for i in range(2)]
    wanted = [[t.clone() for t in state] for state in (keys, values)]
    cos_sin = keys_like(2, 1, 1, DIM, torch.float16)[:, 0]
    for state in (keys, wanted[0]):
        torch.ops.kvpass.append_cos_sin(state[-1], cos_sin, state[len(own[0]) - 1], plans[0])
    arguments = (query(2, 4, 1, DIM), None, 0.125, *plans)
    for state, x, plan in zip((wanted[0][:-1], wanted[1]), new, plans, strict=True):
        torch.ops.kvpass.append(state, x, plan)
    expected = dense_attention(arguments[0], *wanted, *arguments[1:])
    step = (*new, *[None] * 5, arguments[0], keys, values, *arguments[1:])
    assert unsupported_reason(*step) is None
    got = append_attention(*step)
    assert relative_error(got, expected) <= TRITON_ATTENTION[torch.float16]
    for state, reference, plan in zip((keys, values), wanted, plans, strict=True):
        same_state(state, reference, plan)


def test_a_clip_of_each_group_and_what_is_launched():
    factors = (0.5, 0.7, 0.9, 1.0)
    clipped = f"int4.token32.clip{','.join(map(str, factors))}/window=9,pack_every=1"
    plans, clip = (clipped, "int4.token32/window=9,pack_every=1"), torch.tensor(factors)
    keys, values = states(plans, 30, heads=HEADS)
    wanted = [[t.clone() for t in state] for state in (keys, values)]
    new = [keys_like(1, HEADS, 1, DIM, torch.float16, i) for i in range(2)]
    arguments = (*new, *[None] * 5, query(1, 4, 1, DIM), keys, values, None, 1.0, *plans)
    assert unsupported_reason(*arguments).endswith("and no tensor has its factors")
    arguments = (*new, None, None, clip, None, *arguments[6:])
    with record_launches() as launches:
        append_attention(*arguments)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["append_both", "attention_split", "attention_merge"]
    append_attention(*arguments)
    for state, reference, x, plan in zip((keys, values), wanted, new, plans, strict=True):
        torch.ops.kvpass.append(reference, x, plan)
        assert_same(state, reference, plan)


@pytest.mark.parametrize(
    ("plans", "shape", "matrix"),
    [
        (CASES[7], (1, 1), 64),
        (CASES[4], (HEADS, 4), 16),
        (CASES[0], (HEADS, 1), 64),
    ],
    ids=str,
)
def test_new_keys_and_the_query_in_another_basis(plans, shape, matrix):
    """Of all heads and of each one, of all channels and of blocks; with sinks and without."""
    total = 30
    keys, values = states(plans, total, heads=HEADS)
    torch.manual_seed(5)
    basis = torch.linalg.qr(torch.randn(1, shape[0], 1, shape[1], matrix, matrix))[0]
    for step, n in enumerate((1, 5)):
        new = [keys_like(1, HEADS, n, DIM, torch.float16, 2 * step + i) for i in range(2)]
        q = query(1, 4, n, DIM)
        wanted = [[t.clone() for t in state] for state in (keys, values)]
        rest = (None, 0.125, *plans, None, True)
        torch.ops.kvpass.append(wanted[0], rotate(new[0], basis), plans[0])
        torch.ops.kvpass.append(wanted[1], new[1], plans[1])
        expected = dense_attention(rotate(q, basis), *wanted, *rest)
        arguments = (*new, *[None] * 4, basis, q, keys, values, *rest)
        assert unsupported_reason(*arguments) is None
        assert (
            relative_error(append_attention(*arguments), expected)
            <= TRITON_ATTENTION[torch.float16]
        )
        # Sums in another order may round to the neighbour of what was rotated exactly.
        total += n
        stored = [torch.ops.kvpass.unpack(x, total, plans[0], q.dtype) for x in (keys, wanted[0])]
        assert relative_error(stored[0], stored[1].double()) <= TRITON_ATTENTION[q.dtype]
        assert_same(values, wanted[1], plans[1])
        for state, plan in zip((keys, values), plans, strict=True):
            poison(state, plan)
