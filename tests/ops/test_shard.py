"""Parts of a cache tensor on several processes are together what one process would hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.cocktail import ChunkBits, use
from kvpass.errors import PlanError
from kvpass.format.parse import parse_plan
from kvpass.format.shard import BLOCK, Shard
from kvpass.format.sharded_plan import ShardedPlan, first_block, part_of
from kvpass.ops import logical
from kvpass.ops.attention_partial import merge
from kvpass.ops.shard import in_order, own_state, sharded
from lowering.cpp import shard as cpp_shard
from tests.cocktail.requests import any_bits
from tests.ops.test_attention import HEADS, MASKS, make_mask
from tests.strategies import SEEDS, poisoned, randn, steps, tensor_plans
from tests.tolerances import ATTENTION_FP32

ops = torch.ops.kvpass
DIM = 16
# Lengths of prompts around the ends of blocks.
PROMPTS = st.builds(lambda b, t: max(1, b * BLOCK + t), st.integers(0, 5), st.integers(-20, 20))


def parts_of(plan, size, first=None):
    first = first_block(plan) if first is None else first
    return [ShardedPlan.of(plan, Shard(rank, size, "0", first)) for rank in range(size)]


def fit_together(plans):
    return all((first_block(*plans) - p.sinks) % p.codec.token_group == 0 for p in plans)


PAIRS = st.tuples(tensor_plans(DIM), tensor_plans(DIM)).filter(fit_together)


def grown(state, plan, tokens):
    """``state`` with room for ``tokens``."""
    fields = plan.layout.own
    return [
        f.moved(t, plan.capacity(tokens)) if f.grows == "capacity" else t
        for f, t in zip(fields, state, strict=True)
    ]


def in_steps(x, plan, lengths, op_suffix=""):
    """The state after the tokens ``x`` have come in steps of these lengths."""
    first, *later = x.split(lengths, dim=2)
    pack, append = (getattr(ops, f"{name}{op_suffix}").default for name in ("pack", "append"))
    state = grown(pack(first, str(plan)), plan, x.shape[2])
    for new in later:
        append(state, new, str(plan))
    return state


@given(tensor_plans(DIM), st.integers(2, 4), PROMPTS, steps(), SEEDS)
def test_parts_are_the_whole_tensor(plan, size, prompt, later, seed):
    lengths = [prompt, *later]
    x = randn(2, 2, sum(lengths), DIM, seed=seed)
    with poisoned():
        whole = in_steps(x, plan, lengths)
        wanted = ops.unpack.default(whole, x.shape[2], str(plan), x.dtype)
        found = [
            ops.unpack_shard.default(in_steps(x, p, lengths, "_shard"), x.shape[2], str(p), x.dtype)
            for p in parts_of(plan, size)
        ]
    got = in_order(torch.cat(found), x.shape[2], str(parts_of(plan, size)[0]))
    assert torch.equal(got, wanted)


@given(
    PAIRS, st.integers(2, 3), PROMPTS, st.integers(1, 16), HEADS, MASKS, st.booleans(),
    st.sampled_from([0, 5, 200]), st.booleans(), SEEDS,
)  # fmt: skip
def test_attention_to_parts_is_attention_to_all(
    pair, size, prompt, n, heads, kind, causal, window, sinks, seed
):
    k_plan, v_plan = pair
    query_heads, kv_heads = heads
    t, lengths = prompt + n, [prompt, n]
    k, v = (randn(1, kv_heads, t, DIM, seed=seed + i) for i in range(2))
    q = randn(1, query_heads, n, DIM, seed=seed + 2)
    mask = make_mask(kind, 1, query_heads, n, t, seed)
    scores = randn(query_heads, seed=seed + 3) if sinks else None
    scale, partials = DIM**-0.5, []
    with poisoned():
        whole = [in_steps(x, p, lengths) for x, p in ((k, k_plan), (v, v_plan))]
        wanted = ops.attention.default(
            q, *whole, mask, scale, str(k_plan), str(v_plan), scores, causal, window
        )
        for rank in range(size):
            plans = [parts_of(p, size, first_block(*pair))[rank] for p in pair]
            states = [in_steps(x, p, lengths, "_shard") for x, p in zip((k, v), plans, strict=True)]
            ends = sharded(states[0], str(plans[0]))[0].segment_ends
            seen = ops.own_mask.default(mask, ends, str(plans[0]), n, t, causal, window)
            own = [own_state(*sharded(s, str(p))) for s, p in zip(states, plans, strict=True)]
            sides = q, own[0].tensors, own[1].tensors, seen, scale, *(str(p.own) for p in plans)
            partials.append(ops.attention_partial.default(*sides, None if rank else scores))
    hidden = wanted.isnan()
    got = merge(torch.cat(partials), size, DIM, q.dtype).masked_fill(hidden, torch.nan)
    assert_close(got, wanted, rtol=0, atol=ATTENTION_FP32, equal_nan=True)


@pytest.mark.parametrize(
    ("plan", "first", "reason"),
    [
        (
            "int4.token16/window=32,pack_every=1/window_size=99",
            0,
            "allowed are plans without window_size",
        ),
        ("int4.token16/window=32,pack_every=1,retained=2,filter=outliers", 0, "retained"),
        ("int2.channel32/sinks=5,window=0,pack_every=32", 0, "behind 5 sinks do not fill blocks"),
        ("int2.channel32/sinks=140,window=0,pack_every=32", 140, "of 128 behind the first 140"),
        ("int2.channel32/sinks=5,window=0,pack_every=32/rope=halves0-16", 5, "before RoPE .* 5"),
    ],
)
def test_what_cannot_be_sharded(plan, first, reason):
    with pytest.raises(PlanError, match=reason):
        ShardedPlan.of(parse_plan(plan), Shard(0, 2, "0", first))


@pytest.mark.parametrize(("keys", "values", "first"), [(5, 37, 37), (32, 5, 5), (32, 1, 1)])
def test_blocks_begin_behind_the_sinks_of_both(keys, values, first):
    texts = (f"int2.channel32/sinks={n},window=0,pack_every=32" for n in (keys, values))
    assert first_block(*map(parse_plan, texts)) == first


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("int4.token16/sinks=5,window=32,pack_every=1", 0),
        ("int2.channel32/sinks=5,window=0,pack_every=32", 5),
        ("int2.channel8|fp/chunk=32", 0),
    ],
)
def test_printed_plans_are_read(text, first):
    plan = part_of(parse_plan(text), Shard(1, 3, "0", first))
    assert str(plan).endswith("/shard=1of3+5@0" if first else "/shard=1of3@0")
    assert parse_plan(str(plan)) == plan


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "text", ["fp", "int2.channel32/window=0,pack_every=128", "int4.token16/window=128,pack_every=1"]
)
def test_bytes_of_a_part(text, size):
    plan, x = parse_plan(text), randn(1, 1, 32768, 64)
    sizes = {
        name: tensor.nbytes
        for name, tensor in zip(plan.layout.names, ops.pack.default(x, text), strict=True)
    }
    window = sizes.pop("window", 0) + sizes.pop("segment_ends")
    for part in parts_of(plan, size):
        held = sum(tensor.nbytes for tensor in ops.pack_shard.default(x, str(part)))
        assert held == pytest.approx(sum(sizes.values()) / size + window, rel=0.03)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_chunks_of_parts_are_those_of_all(kind, size):
    """A prompt, decode steps and another prompt, with kernels in C++ besides."""
    plans = [parse_plan(f"int2.{x}|int4.{x}|fp/chunk=8") for x in ("channel8", "token16")]
    lengths, scale = [150, 1, 5], 0.25
    k, v = (randn(2, 2, sum(lengths) + 40, DIM, seed=seed) for seed in (1, 2))
    q, t = randn(2, 4, 3, DIM, seed=3), k.shape[2]
    mask, scores = make_mask(kind, 2, 4, 3, t, seed=4), randn(4, seed=5)

    def stored(x, plan):
        first, *steps, last = x.split([*lengths, 40], dim=2)
        with use(any_bits(2, lengths[0], seed=5)):
            found = logical.reorder_chunks(None, first, str(plan))
        for new in steps:
            found = logical.append(found, new, str(plan))
        with use(any_bits(2, 40, seed=6)):
            return logical.reorder_chunks(found, last, str(plan))

    whole = [stored(x, plan) for x, plan in zip((k, v), plans, strict=True)]
    variant = mask, scale, *map(str, plans), scores, True
    wanted = ops.attention_chunks.default(q, *(x.state for x in whole), *variant)
    together, partials, fast = torch.zeros_like(k), [], []
    for rank in range(size):
        parts = [part_of(plan, Shard(rank, size, "0")) for plan in plans]
        keys, values = (stored(x, part) for x, part in zip((k, v), parts, strict=True))
        assert keys.counts.sum(1).max() < t / size + 8 * 3
        assert logical.length(keys) == t
        names = list(map(str, parts))
        found = ops.unpack_chunks_shard.default(keys.state, t, names[0], k.dtype)
        assert found.is_contiguous(), "compiled code relies on it"
        together += found
        seen = ops.own_mask.default(mask, keys.segment_ends, names[0], 3, t, True, 0)
        arguments = q, keys.state, values.state, seen, scale, *names, None if rank else scores
        partials.append(ops.attention_partial_chunks_shard.default(*arguments))
        assert cpp_shard.unsupported_attention_chunks(*arguments) is None
        fast.append(cpp_shard.attention_partial_chunks_shard(*arguments))
    assert torch.equal(together, whole[0].decode())
    for found in (partials, fast):
        got = merge(torch.cat(found), size, DIM, q.dtype)
        assert_close(got, wanted, rtol=0, atol=ATTENTION_FP32)


@pytest.mark.parametrize("size", [2, 4])
def test_rooms_of_a_part_with_chunks(size):
    """Each level has a share of its own room, but for what is rounded up to whole tiles."""
    plan, levels = parse_plan("int2.channel32|int4.channel32|fp/chunk=32"), (2, 4, 16)
    picks = torch.tensor([0.88, 0.085, 0.035]).multinomial(1000, replacement=True)
    bits, x = ChunkBits((tuple(levels[i] for i in picks),), (100,)), randn(1, 1, 32768, 64)

    def rooms(plan):
        with use(bits):
            held = logical.reorder_chunks(None, x, str(plan))
        return {f.name: f.room(getattr(held, f.name)) for f in plan.layout.own if f.grows}

    whole = rooms(plan)
    for rank in range(size):
        for name, room in rooms(part_of(plan, Shard(rank, size, "0"))).items():
            assert 0 < room - whole[name] / size + plan.tile <= 3 * plan.tile
