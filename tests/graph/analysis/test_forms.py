"""Every spelling of attention is found, fused, and answers what it did.

`run` compares each rewritten graph with the original one on the decoded cache.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf

from kvpass.ops import logical
from kvpass.recipes import recipe
from tests.graph.recorder import run

LOW = torch.finfo(torch.float32).min
KIVI = recipe("kivi-2bit", group=8, residual=8)


def visible(n, t):
    return torch.arange(t) <= torch.arange(t - n, t)[:, None]


def additive(n, t):
    return torch.where(visible(n, t), 0.0, LOW)[None, None]


def slopes(heads, t):
    """ALiBi: ``[heads, 1, t]``."""
    return -torch.tensor([2.0**-i for i in range(heads)])[:, None, None] * torch.arange(t).flip(0)


def repeated(x, groups=2):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, groups, t, d).reshape(b, h * groups, t, d)


def softmax_matmul(scores, values):
    weights = nnf.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(nnf.dropout(weights, p=0.1, training=False), values)


def soft_capped(q, k, v, layer):  # gemma2
    keys, values = (repeated(x) for x in layer.update(k, v))
    scores = torch.tanh(torch.matmul(q, keys.transpose(2, 3)) * 0.5 / 2.0) * 2.0
    return softmax_matmul(scores + additive(q.shape[2], keys.shape[2]), values)


def sinks(q, k, v, layer, sink):  # gpt_oss
    keys, values = (repeated(x) for x in layer.update(k, v))
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25 + additive(q.shape[2], keys.shape[2])
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    combined = torch.cat([scores, column], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = nnf.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(nnf.dropout(weights, p=0.0, training=True).to(values.dtype), values)


def gated(q, k, v, layer, sink):  # granite_swa
    keys, values = (repeated(x) for x in layer.update(k, v))
    scores = torch.matmul(q, keys.transpose(2, 3)) * 0.25 + additive(q.shape[2], keys.shape[2])
    excess = torch.logsumexp(scores, dim=-1) - sink.view(1, -1, 1)
    gate = excess.to(torch.float32).sigmoid()
    return softmax_matmul(scores, values) * gate.unsqueeze(-1).to(values.dtype)


def baddbmm_alibi(q, k, v, layer):  # bloom
    keys, values = layer.update(k, v)
    b, h, n, d = q.shape
    alibi = slopes(h, keys.shape[2]).repeat(b, 1, 1)
    k3, v3 = keys.reshape(b * h, -1, d).transpose(-1, -2), values.reshape(b * h, -1, d)
    scores = alibi.baddbmm(batch1=q.reshape(b * h, -1, d), batch2=k3, beta=1.0, alpha=0.25)
    scores = scores.view(b, h, n, -1) + additive(n, keys.shape[2])
    weights = nnf.softmax(scores, dim=-1).view(b * h, n, -1)
    return torch.bmm(weights, v3).view(b, h, n, d)


def baddbmm_zeros(q, k, v, layer):  # gpt_neox_japanese
    keys, values = layer.update(k, v)
    b, h, n, d = q.shape
    t = keys.shape[2]
    k3 = keys.view(b * h, t, d).transpose(1, 2)
    scores = torch.baddbmm(torch.zeros(b * h, n, t), q.view(b * h, n, d), k3, beta=1.0, alpha=0.25)
    return softmax_matmul(scores.view(b, h, n, -1) + additive(n, t), values)


def bmm(q, k, v, layer):  # xglm
    keys, values = layer.update(k, v)
    b, h, n, d = q.shape
    t = keys.shape[2]
    q3, k3, v3 = (x.reshape(b * h, -1, d) for x in (q * 0.25, keys, values))
    scores = torch.bmm(q3, k3.transpose(1, 2)).view(b, h, n, t) + additive(n, t)
    scores = torch.max(scores, torch.tensor(LOW)).view(b * h, n, t)
    weights = nnf.softmax(scores, dim=-1).view(b, h, n, t).view(b * h, n, t)
    return torch.bmm(weights, v3)


def upcast(q, k, v, layer):  # gptj, gpt_neo
    keys, values = layer.update(k, v)
    n, t = q.shape[2], keys.shape[2]
    scores = torch.matmul(q.to(torch.float32), keys.float().transpose(-1, -2))
    scores = torch.where(visible(n, t), scores / 4.0, torch.tensor(LOW)) + additive(n, t)
    return torch.matmul(nnf.softmax(scores, dim=-1).type(values.dtype), values)


def hidden(q, k, v, layer):  # mpt
    keys, values = layer.update(k, v)
    n, t = q.shape[2], keys.shape[2]
    scores = torch.matmul(q, keys.mT) * 0.25 + slopes(q.shape[1], t)
    return softmax_matmul(scores.masked_fill(~visible(n, t)[None, None], LOW), values)


def hidden_alone(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, keys.permute(0, 1, 3, 2))
    return softmax_matmul(
        scores.masked_fill(~visible(q.shape[2], keys.shape[2]), -torch.inf), values
    )


def scaled_after_mask(q, k, v, layer):  # codegen, falcon with ALiBi
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, keys.transpose(-1, -2)) + slopes(q.shape[1], keys.shape[2])[None]
    scores *= 0.25
    scores = scores / 2.0 + additive(q.shape[2], keys.shape[2])[0, 0]
    return softmax_matmul(scores, values)


def interleaved(q, k, v, layer):
    keys, values = (x.repeat_interleave(2, dim=1) for x in layer.update(k, v))
    return softmax_matmul(torch.matmul(q, keys.swapaxes(2, 3)) * 0.25, values)


def merged_late(q, k, v, layer):  # gpt2 with reordering
    keys, values = layer.update(k, v)
    b, h, n, d = q.shape
    t = keys.shape[2]
    k3 = keys.transpose(-1, -2).reshape(-1, d, t)
    scores = torch.empty(b * h, n, t)
    scores = torch.baddbmm(scores, q.reshape(-1, n, d).float(), k3.float(), beta=0, alpha=0.25)
    return softmax_matmul(scores.reshape(b, h, n, t), values)


def sdpa_flat_mask(q, k, v, layer):
    keys, values = layer.update(k, v)
    mask = visible(q.shape[2], keys.shape[2])
    return nnf.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def sdpa_expanded(q, k, v, layer):  # multi-query attention
    keys, values = (x.expand(-1, q.shape[1], -1, -1) for x in layer.update(k, v))
    return nnf.scaled_dot_product_attention(q, keys.contiguous(), values, scale=0.5)


def sdpa_broadcast(q, k, v, layer):
    keys, values = layer.update(k, v)
    return softmax_matmul(torch.matmul(q, keys.transpose(2, 3)) * 0.25, values)


MHA, MQA = (4, 4), (4, 1)
SINK = {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}
FORMS = {
    "soft-capping": (soft_capped, (4, 2), {}, "mask tensor, scale 0.5, softcap 2"),
    "sinks": (sinks, (4, 2), SINK, "mask tensor, scale 0.25, sinks"),
    "sinks as a gate": (gated, (4, 2), SINK, "mask tensor, scale 0.25, sinks"),
    "baddbmm with ALiBi": (baddbmm_alibi, MHA, {}, "mask tensor, scale 0.25"),
    "baddbmm with zeros": (baddbmm_zeros, MHA, {}, "mask tensor, scale 0.25"),
    "bmm": (bmm, MHA, {}, "mask tensor, scale 1"),
    "product in float32": (upcast, MHA, {}, "mask tensor, scale 0.25"),
    "masked_fill": (hidden, MHA, {}, "mask tensor, scale 0.25"),
    "masked_fill alone": (hidden_alone, MHA, {}, "mask tensor, scale 1"),
    "scale after the mask": (scaled_after_mask, MHA, {}, "mask tensor, scale 0.125"),
    "repeat_interleave": (interleaved, (4, 2), {}, "no mask, scale 0.25"),
    "transposed, then merged": (merged_late, MHA, {}, "no mask, scale 0.25"),
    "two-dimensional mask": (sdpa_flat_mask, (4, 2), {}, "mask tensor, scale 0.25"),
    "expanded": (sdpa_expanded, MQA, {}, "no mask, scale 0.5"),
    "broadcast": (sdpa_broadcast, MQA, {}, "no mask, scale 0.25"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_fused_and_agrees(name):
    function, heads, extra, detail = FORMS[name]
    torch._dynamo.reset()
    prefill, decode, verify = run(function, [20, 1, 3], KIVI, batch=2, heads=heads, **extra)
    assert prefill.fired("quantize_cache") == 2
    for record in (decode, verify):
        assert {rule for rule, _ in record.refused()} <= {"mask_to_bounds"}
        assert record.fired("decode_reader") == 0
        details = [e.detail for e in record.events if e.rule == "fuse_attention"]
        assert details == [f"{record.sites.attentions[0].form} attention, {detail}"]
        (fused,) = record.after.graph.find_nodes(op="call_function", target=logical.attention)
        assert fused.meta["example_value"].dim() == 4
        left = {str(node.target) for node in record.after.graph.nodes}
        assert not any("softmax" in t or "matmul" in t or "scaled_dot" in t for t in left)


def narrowed(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q.bfloat16(), keys.bfloat16().transpose(2, 3)) * 0.25
    return softmax_matmul(scores, values)


def dropped(q, k, v, layer):
    keys, values = layer.update(k, v)
    weights = nnf.softmax(torch.matmul(q, keys.transpose(2, 3)), dim=-1)
    return torch.matmul(nnf.dropout(weights, p=1e-9, training=True), values)


def wrong_softmax(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, keys.transpose(2, 3))
    return torch.matmul(nnf.softmax(scores, dim=1), values)


def wide_output(q, k, v, layer):
    keys, values = layer.update(k, v)
    weights = nnf.softmax(torch.matmul(q, keys.transpose(2, 3)), dim=-1)
    return torch.matmul(weights.to(torch.float64), values.to(torch.float64))


def tiled(q, k, v, layer):
    keys, values = (x.repeat(1, 2, 1, 1) for x in layer.update(k, v))
    return nnf.scaled_dot_product_attention(q, keys, values)


def other_columns(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, keys.transpose(2, 3))
    column = q.mean(-1, keepdim=True).expand(-1, -1, -1, -1)
    weights = nnf.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    return torch.matmul(weights, values)


REFUSED = {
    "narrowing": (narrowed, {}, "torch.float32 is narrowed to torch.bfloat16 (at bfloat16_1)"),
    "dropout": (dropped, {}, "1e-09, expected no dropout (at dropout)"),
    "softmax over heads": (wrong_softmax, {}, "dim is 1, expected the last (at softmax)"),
    "tiled heads": (
        tiled,
        {},
        "keys come from repeat, not from a cache update (at keys)",
    ),
    "columns that are no sinks": (
        other_columns,
        {},
        "the last column is made of [1, 4, s0, 1], expected one score per head (at cat_2)",
    ),
    "output in float64": (
        wide_output,
        {},
        "the query is torch.float32, the output torch.float64 (at matmul_1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_attentions_are_left_and_get_the_cache_decoded(name):
    function, extra, reason = REFUSED[name]
    torch._dynamo.reset()
    heads = (4, 2) if name == "tiled heads" else MHA
    _, decode = run(function, [20, 3], KIVI, heads=heads, **extra)
    assert decode.fired("fuse_attention") == 0
    details = [e.detail for e in decode.events if e.rule == "decode_reader"]
    assert len(details) == 2
    assert all(detail.endswith(f": {reason}") for detail in details), details
