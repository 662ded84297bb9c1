"""The arithmetic in an attention's mask becomes bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from torch.testing import assert_close
from transformers import DynamicCache

import kvpass
from kvpass.graph.spellings import op_name
from kvpass.inspect.explain import describe
from kvpass.ops import logical
from kvpass.recipes import recipe
from tests.graph.recorder import Layer, Recorder, run
from tests.harness import compiled, left_padding, run_steps
from tests.models import prompt, tiny_model
from tests.strategies import randn

KIVI = recipe("kivi-2bit", group=8, residual=16)
LOW = torch.finfo(torch.float32).min


def places(q, keys):
    n, t = q.shape[2], keys.shape[2]
    return torch.arange(t), (torch.arange(n) + (t - n))[:, None]


def causal(q, keys):
    k, i = places(q, keys)
    return (k <= i)[None, None]


def window(q, keys):
    k, i = places(q, keys)
    return ((k > i - 6) & (k <= i))[None, None]


def one_later(q, keys):
    k, i = places(q, keys)
    return (k <= i + 1)[None, None]


def one_more(q, keys):
    k, i = places(q, keys)
    return (k < i)[None, None] | (k == 0)


def top_left(q, keys):
    n, t = q.shape[2], keys.shape[2]
    return (torch.arange(t) <= torch.arange(n)[:, None])[None, None]


def additive(q, keys):
    return torch.where(window(q, keys), torch.zeros(()), LOW)


def written(q, keys):
    mask = causal(q, keys).expand(1, 1, -1, -1).clone()
    mask[..., 2] = False
    return mask


def attending(mask):
    def attend(q, k, v, layer):
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask(q, keys), enable_gqa=True
        )

    return attend


def events(record):
    return [event.detail for event in record.events if event.rule == "mask_to_bounds"]


def fused(record):
    return record.after.graph.find_nodes(op="call_function", target=logical.attention)


# run() checks: attention(q, K, V, rest, bounds) = attention(q, K, V, mask), step by step.
@pytest.mark.parametrize(
    ("mask", "one", "several"),
    [
        (causal, "all is visible", "causal"),
        (window, "window 6", "causal, window 6"),
        (additive, "window 6", "causal, window 6"),
    ],
)
def test_applies_to_index_arithmetic(mask, one, several):
    prefill, *decode = run(attending(mask), [20, 1, 3], KIVI)
    assert events(prefill) == []
    for record, detail in zip(decode, (one, several), strict=True):
        assert events(record) == [detail]
        assert record.refused() == []
        (node,) = fused(record)
        assert node.kwargs["mask"] is None
        names = {op_name(n) for n in record.after.graph.nodes}
        assert not names & {"arange", "le", "gt", "where", "and_"}


@pytest.mark.parametrize("mask", [one_later, one_more, top_left, written])
def test_what_is_not_understood_stays(mask):
    for record in run(attending(mask), [20, 3, 3])[1:]:
        ((rule, reason),) = record.refused()
        assert rule == "mask_to_bounds"
        assert "no bound" in reason or "written" in reason
        (node,) = fused(record)
        assert node.kwargs["mask"] is not None


def test_data_stays_beside_the_bounds():
    def attend(q, k, v, layer, data):
        keys, values = layer.update(k, v)
        t = keys.shape[2]
        mask = causal(q, keys) & data[:, None, None, :t] & ~(data[:, :t] & data[:, 1 : t + 1])
        return nnf.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    data = torch.rand(1, 60, generator=torch.Generator().manual_seed(0)) > 0.4
    data[:, 21:23] = torch.tensor([True, False])
    _, several = run(attend, [20, 3], data=data)
    assert events(several) == ["causal, a mask of the rest"]
    (node,) = fused(several)
    assert node.kwargs["mask"].meta["example_value"].shape == (1, 1, 1, 23)
    assert op_name(node.kwargs["mask"]) == "logical_and"


def test_a_mask_that_is_an_argument_stays():
    def attend(q, k, v, layer, mask):
        keys, values = layer.update(k, v)
        return nnf.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    recorder, layer = Recorder(), Layer()
    function = torch.compile(attend, backend=recorder)
    with torch.no_grad():
        for n, t in ((20, 20), (3, 23)):
            mask = torch.ones(n, t, dtype=torch.bool).tril(t - n)[None, None]
            function(randn(1, 4, n, 16), randn(1, 2, n, 16), randn(1, 2, n, 16), layer, mask)
            recorder.records[-1].check(atol=2e-6)
    assert recorder.records[1].refused() == [
        ("mask_to_bounds", "placeholder is data, or no bound (at l_mask_)")
    ]


def recorded(model, steps, mask=None):
    recorder = Recorder(KIVI)
    model.forward = torch.compile(model.forward, backend=recorder)
    cache, ids, at = DynamicCache(config=model.config), prompt(2, 60), 0
    with torch.no_grad():
        for n in steps:
            padding = None if mask is None else mask[:, : at + n]
            model(ids[:, at : at + n], attention_mask=padding, past_key_values=cache)
            recorder.records[-1].check(atol=2e-5)
            at += n
    return recorder.records


MODELS = {
    "llama": ({}, ["a mask of the rest", "causal, a mask of the rest"]),
    "mistral": (
        {"sliding_window": 16},
        ["a mask of the rest", "causal, window 16, a mask of the rest"],
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_padded_batches_leave_the_padding_which_layers_share(family):
    options, details = MODELS[family]
    model = tiny_model(family, **options)
    _, one, several = recorded(model, [30, 1, 3], left_padding([0, 5], 34))
    for record, detail in zip((one, several), details, strict=True):
        assert events(record) == [detail] * 2
        masks = {node.kwargs["mask"] for node in fused(record)}
        assert len(masks) == 1
        assert masks.pop().meta["example_value"].shape[:3] == (2, 1, 1)
        assert not {op_name(n) for n in record.after.graph.nodes} & {"le", "gt", "and_"}


def test_a_padded_additive_mask_stays_which_is_no_failure():
    model = tiny_model("llama", attention="eager", layers=1)
    twin = compiled(model, "fp", strict=True)
    ids, mask = prompt(2, 23), left_padding([0, 5], 23)
    got, _ = run_steps(twin, ids, [20, 3], mask)
    expected, _ = run_steps(model, ids, [20, 3], mask)
    assert_close(got[:, 5:], expected[:, 5:], rtol=0, atol=1e-4)
    _, several = kvpass.explain(twin).graphs
    (reason,) = events(several)
    # Masks differ between versions of transformers.
    assert "may hide all tokens of a query" in reason or "has other values than 0" in reason
    assert several.warnings == []
    assert f"left    mask_to_bounds: {reason}" in describe(several)
