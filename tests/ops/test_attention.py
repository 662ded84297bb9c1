"""``kvpass::attention`` is dense softmax attention over the decoded cache."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.ops.attention import mask_rows
from tests.ops.test_append import packed_in_steps
from tests.strategies import SEEDS, poisoned, randn, tensor_plans
from tests.tolerances import ATTENTION_FP32

ops = torch.ops.kvpass
# Query heads per KV head: 1 is multi-head; with one KV head more than 1 is multi-query.
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (4, 1), (3, 3)])
MASKS = st.sampled_from(
    ["none", "bool", "causal", "additive", "per head", "per head bool", "one row"]
)


def dense(q, k, v, mask, scale):
    """Softmax attention in float64, written out."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def make_mask(kind: str, b: int, heads: int, n: int, t: int, seed: int):
    """Every row sees at least one key."""
    shown = randn(b, heads, n, t, seed=seed) > 0
    shown[..., seed % t] = True
    causal = torch.arange(t) <= torch.arange(t - n, t).unsqueeze(1)
    return {
        "none": None,
        "bool": shown[:, :1],
        "causal": causal[None, None],
        "additive": randn(b, 1, n, t, seed=seed + 1),
        "per head": randn(1, heads, n, t, seed=seed + 2),
        "per head bool": shown,
        "one row": shown[:, :1, :1],
    }[kind]


@given(
    st.sampled_from([16, 64, 80]).flatmap(
        lambda d: st.tuples(st.just(d), tensor_plans(d), tensor_plans(d))
    ),
    HEADS,
    MASKS,
    st.integers(1, 16),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    SEEDS,
)
def test_equals_dense_attention_on_the_decoded_cache(case, heads, kind, n, lengths, seed):
    d, k_plan, v_plan = case
    query_heads, kv_heads = heads
    lengths = [*lengths, n]
    t, b = sum(lengths), 2
    with poisoned():
        keys, values = (
            packed_in_steps(randn(b, kv_heads, t, d, seed=seed + i), plan, lengths)
            for i, plan in enumerate((k_plan, v_plan))
        )
        q = randn(b, query_heads, n, d, seed=seed + 2)
        mask = make_mask(kind, b, query_heads, n, t, seed)
        out = ops.attention.default(
            q, keys.state, values.state, mask, d**-0.5, str(k_plan), str(v_plan)
        )
    expected = dense(q, keys.decode(), values.decode(), mask, d**-0.5)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert_close(out.double(), expected, rtol=0, atol=ATTENTION_FP32)


@given(HEADS, st.integers(1, 16), st.integers(1, 5), SEEDS)
def test_mask_rows_follow_the_queries(heads, n, t, seed):
    query_heads, kv_heads = heads
    groups = query_heads // kv_heads
    for shape in [(2, query_heads, n, t), (1, 1, n, t), (2, 1, 1, t), (1, query_heads, 1, t)]:
        mask = randn(*shape, seed=seed)
        rows = mask_rows(mask, kv_heads, groups, n).expand(shape[0], kv_heads, groups * n, t)
        full = mask.expand(shape[0], query_heads, n, t)
        for head in range(query_heads):
            h, g = divmod(head, groups)
            assert torch.equal(rows[:, h, g * n : (g + 1) * n], full[:, head])


def test_values_may_have_other_head_dims():
    k, v = randn(1, 2, 30, 16, seed=1), randn(1, 2, 30, 80, seed=2)
    plans = "int4.channel8/window=0,pack_every=8", "int4.token8/window=4,pack_every=1"
    keys, values = (ops.pack.default(x, plan) for x, plan in zip((k, v), plans, strict=True))
    q = randn(1, 4, 3, 16, seed=3)
    out = ops.attention.default(q, keys, values, None, 0.3, *plans)
    decoded = [
        ops.unpack.default(state, 30, plan, torch.float32)
        for state, plan in zip((keys, values), plans, strict=True)
    ]
    assert out.shape == (1, 4, 3, 80)
    assert_close(out.double(), dense(q, *decoded, None, 0.3), rtol=0, atol=ATTENTION_FP32)
