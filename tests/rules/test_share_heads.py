"""Dense attention reads each KV head once."""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.recipes import recipe
from kvpass.rules import Context
from kvpass.rules.share_heads import ShareHeads
from tests.graph.recorder import run
from tests.rules.test_fuse_attention import causal, eager, repeated, sdpa, sdpa_repeated
from tests.strategies import randn


def by_name(q, k, v, layer):
    keys, values = layer.update(k, v)
    return nnf.scaled_dot_product_attention(
        query=q, key=repeated(keys), value=repeated(values), is_causal=True
    )


# run() checks that the results of both graphs agree.
def test_applies_to_prompts():
    for function, prompts in ((sdpa_repeated, [20, 40]), (by_name, [20])):
        for record in run(function, prompts):
            assert record.refused() == []
            (event,) = (e for e in record.events if e.rule == "share_heads")
            assert event.detail == "2 KV heads are read without copies"
            targets = {node.target for node in record.after.graph.nodes}
            assert "expand" not in targets
            assert "reshape" not in targets


def test_does_not_apply():
    """To heads that are not repeated, to the matmul form, and where the attention is packed."""
    for function in (sdpa, eager):
        assert all(r.fired("share_heads") == 0 for r in run(function, [20, 1]))
    prefill, decode = run(sdpa_repeated, [20, 1])
    assert (prefill.fired("share_heads"), decode.fired("share_heads")) == (1, 0)


def test_another_attention_beside_the_cache_is_left_alone():
    def cross(q, k, v, layer):
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, repeated(k), repeated(v)), keys + 0, values + 0

    (record,) = run(cross, [20])
    assert record.fired("share_heads") == 0


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_identity(kv_heads, groups, n, past, masked):
    q = randn(2, kv_heads * groups, n, 8, seed=1)
    k, v = (randn(2, kv_heads, past + n, 8, seed=seed) for seed in (2, 3))
    mask = causal(q, k) if masked else None

    def repeat(x):
        b, h, t, d = x.shape
        return x[:, :, None].expand(b, h, groups, t, d).reshape(b, h * groups, t, d)

    assert_close(
        nnf.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        nnf.scaled_dot_product_attention(q, repeat(k), repeat(v), mask),
        rtol=0, atol=2e-6,
    )  # fmt: skip


def test_gpus_keep_their_copies():
    (record,) = run(sdpa_repeated, [20])
    graph = record.before.graph
    sites = record.sites
    site = sites.attentions[0]
    site.q.meta["example_value"] = torch.empty_like(site.q.meta["example_value"], device="meta")
    assert ShareHeads().match(site.root, Context(graph, sites, recipe("fp"))) is None
