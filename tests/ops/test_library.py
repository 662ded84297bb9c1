"""Fakes tell the truth: shapes, dtypes and strides of every op; torch's own operator checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from kvpass.format.parse import parse_plan
from tests.strategies import DTYPES, poisoned, randn, tensor_plans

ops = torch.ops.kvpass
PLANS = ["fp", "int2.channel8/window=0,pack_every=16", "int4.token8/window=8,pack_every=1"]
CASES = st.sampled_from([16, 64, 80, 128]).flatmap(
    lambda d: st.tuples(st.just(d), tensor_plans(d), tensor_plans(d))
)


def described(results):
    """Shapes, dtypes, devices, and strides; those of dimensions of size 1 mean nothing."""
    results = results if isinstance(results, list | tuple) else [results]
    return [
        (
            tuple(t.shape),
            t.dtype,
            t.device.type,
            [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1],
        )
        for t in results
    ]


@given(CASES, st.integers(1, 2), st.integers(1, 3), st.integers(1, 300), DTYPES)
def test_fakes_describe_the_results(case, b, h, tokens, dtype):
    d, k_plan, v_plan = case
    x, q = randn(b, h, tokens, d, dtype=dtype), randn(b, 2 * h, 3, d, dtype=dtype)
    mode = FakeTensorMode()

    def both(op, *args):
        real = op(*args)
        with mode:
            fake = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))
        assert described(fake) == described(real)
        return real

    keys = both(ops.pack.default, x, str(k_plan))
    values = both(ops.pack.default, x, str(v_plan))
    both(ops.unpack.default, keys, tokens, str(k_plan), dtype)
    both(ops.attention.default, q, keys, values, None, 0.5, str(k_plan), str(v_plan))


@pytest.mark.parametrize("text", PLANS)
def test_opcheck(text):
    x, plan = randn(2, 2, 37, 16), parse_plan(text)
    # pack returns memory that nothing has written: its values cannot be compared.
    opcheck(ops.pack.default, (x, text), test_utils=("test_schema", "test_faketensor"))
    state = ops.pack.default(x, text)
    for tensor in state[:-1]:
        tensor.nan_to_num_(0.0)
    ops.append.default(state, randn(2, 2, 1, 16), text)
    opcheck(ops.unpack.default, (state, 38, str(plan), torch.float32))
    opcheck(ops.append.default, (state, randn(2, 2, 3, 16), text))
    opcheck(ops.attention.default, (randn(2, 4, 3, 16), state, state, None, 0.25, text, text))
    mask = randn(2, 1, 3, 38) > -1
    opcheck(ops.attention.default, (randn(2, 4, 3, 16), state, state, mask, 0.25, text, text))


@pytest.mark.parametrize("text", PLANS)
def test_packing_leaves_no_guard_on_the_number_of_tokens(text):
    seen = []

    def record(gm, examples):
        seen.append(gm)
        return gm.forward

    def pack(x):
        return ops.pack.default(x, text)

    compiled = torch.compile(pack, backend=record, fullgraph=True, dynamic=True)
    for tokens in (5, 40, 700, 2):
        x = randn(1, 2, tokens, 16)
        assert described(compiled(x)) == described(pack(x))
    assert len(seen) == 1


@given(CASES, st.integers(1, 300))
@settings(max_examples=20)
def test_results_do_not_depend_on_unwritten_memory(case, tokens):
    d, plan, _ = case
    x, text = randn(1, 2, tokens, d), str(plan)
    with poisoned():
        state = ops.pack.default(x, text)
        poison = ops.unpack.default(state, tokens, text, x.dtype)
    zeros = [t.nan_to_num(0.0) for t in ops.pack.default(x, text)]
    assert torch.equal(poison, ops.unpack.default(zeros, tokens, text, x.dtype))
    assert poison.isfinite().all()
