"""Generated C++ on windows that grow with the context, against the references, in poisoned
memory."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kvpass.format.parse import parse_plan
from kvpass.ops.append import append as reference_append
from kvpass.ops.attention import attention as reference_attention
from kvpass.ops.pack import pack as reference_pack
from kvpass.tensor.packed import PackedKV
from lowering.cpp import append, attention, pack, unpack
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import keys_like, poison, relative_error, written

RULES = ("fraction=0.25", "sinks pivotal=0.6")


@pytest.mark.parametrize("rule", RULES)
def test_steps_and_prompts(rule):
    """Both tensors grow as `PackedKV` has them grow."""
    sinks = "sinks=5," if "sinks" in rule else ""
    rule = rule.split()[-1]
    plans = (
        f"int2.channel8/{sinks}window=0,pack_every=16,{rule}",
        f"int4.token16/{sinks}window=7,pack_every=3,{rule}",
    )
    got, wanted = [], []
    for seed, plan in enumerate(plans):
        x = keys_like(2, 2, 200, 64, torch.float32, seed)
        assert pack.unsupported_reason(x, plan) is None
        for handles, function in ((got, pack.pack), (wanted, reference_pack)):
            parsed = parse_plan(plan)
            handles.append(PackedKV(function(x, plan), parsed, 200, torch.float32))
    for i, n in enumerate((1, 1, 16, 100, 1, 1, 1, 1, 1, 90, 1, 1)):
        for t, plan in enumerate(plans):
            new = keys_like(2, 2, n, 64, torch.float32, 2 * i + t)
            for handles, function in ((got, append.append), (wanted, reference_append)):
                handles[t].reserve(n)
                poison(handles[t].state, plan, n)
                function(handles[t].state, new, plan)
                handles[t] = handles[t].extended(n)
            states = (written(handles[t].state, plan) for handles in (got, wanted))
            assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
            assert append.unsupported_reason(got[t].state, new, plan) is None
        q = keys_like(2, 4, 1, 64, torch.float32, i)
        states = [poison(handle.state, plan) for handle, plan in zip(got, plans, strict=True)]
        assert attention.unsupported_reason(q, *states, None, 0.1, *plans) is None
        answers = attention.attention(q, *states, None, 0.1, *plans)
        expected = reference_attention(q, *(h.state for h in wanted), None, 0.1, *plans)
        assert relative_error(answers, expected) <= 2 * CPP_ATTENTION[torch.float32]
    tokens = got[0].shape[2]
    for handle, plan in zip(got, plans, strict=True):
        decoded = unpack.unpack(handle.state, tokens, plan, torch.float32)
        assert_close(decoded, handle.decode(), rtol=1e-6, atol=1e-6)
