"""Generated C++ for parts of sequences against its references."""

from __future__ import annotations

import pytest
import torch

from kvpass.format.parse import parse_plan
from kvpass.format.shard import Shard
from kvpass.format.sharded_plan import ShardedPlan
from kvpass.ops import attention_partial as reference
from kvpass.ops.shard import own_state, sharded
from lowering.cpp.attention import attention_partial, unsupported_partial
from lowering.cpp.shard import append_shard, pack_shard, unsupported_append, unsupported_pack
from tests.ops.test_shard import grown
from tests.strategies import poisoned, randn
from tests.tolerances import CPP_ATTENTION
from tests.triton_templates.kernel_reference import kivi

ops = torch.ops.kvpass
HEADS, DIM = 2, 64
# Prompts that leave a rank without tokens, or with a part of a block; steps into the next block.
STEPS = [[3, *[1] * 4], [250, *[1] * 8, 16, 5], [700, 40, 1]]
SINKS = "int4.token32.fp8/sinks=5,window=40,pack_every=1"


def both(x, plan, lengths):
    """The state after the tokens ``x`` have come in steps of these lengths, and the reference's."""
    text, made = str(plan), []
    first, *later = x.split(lengths, dim=2)
    for pack, append in (
        (pack_shard, append_shard),
        (ops.pack_shard.default, ops.append_shard.default),
    ):
        with poisoned():
            state = grown(pack(first, text), plan, x.shape[2])
        assert unsupported_pack(first, text) is None
        for new in later:
            assert unsupported_append(state, new, text) is None
            append(state, new, text)
        made.append(state)
    return made


@pytest.mark.parametrize("plans", [kivi(4), ("fp", "fp"), (SINKS, SINKS)], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_those_of_the_references(plans, rank):
    sharded_plans = [ShardedPlan.of(parse_plan(p), Shard(rank, 2, "0")) for p in plans]
    for lengths in STEPS:
        tokens, own = sum(lengths), []
        for seed, plan in enumerate(sharded_plans):
            states = both(randn(1, HEADS, tokens, DIM, seed=seed), plan, lengths)
            got, wanted = (
                ops.unpack_shard.default(s, tokens, str(plan), torch.float32) for s in states
            )
            assert torch.equal(got, wanted)
            own.append(own_state(*sharded(states[0], str(plan))).tensors)
        for n in (1, 16):
            q = randn(1, 4 * HEADS, n, DIM, seed=9)
            mask = randn(1, 1, n, tokens, seed=8) > 0
            names = [str(p.own) for p in sharded_plans]
            arguments = (q, *own, None if n == 1 else mask, DIM**-0.5, *names)
            assert unsupported_partial(*arguments) is None
            found, wanted = attention_partial(*arguments), reference.attention_partial(*arguments)
            assert found.dtype == torch.float32
            # The logarithms of sums may be that of nothing, and reach 5 elsewhere.
            assert torch.equal(found.isinf(), wanted.isinf())
            difference = (found - wanted).masked_fill(found.isinf(), 0).abs().max()
            assert difference <= 5 * CPP_ATTENTION[q.dtype]
