"""What lies between a cache tensor and the product that reads it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf

from tests.graph.recorder import run


def reading(read, swap=lambda x: x.transpose(2, 3)):
    """Attention over ``read(cache tensor)``."""

    def attend(q, k, v, layer):
        keys, values = layer.update(k, v)
        scores = torch.matmul(q, swap(read(keys)))
        return torch.matmul(nnf.softmax(scores, dim=-1), read(values))

    return attend


def late(q, k, v, layer):
    """The query is changed in place between the scores and the output."""
    keys, values = layer.update(k, v)
    q = q.clone()
    weights = nnf.softmax(torch.matmul(q, keys.transpose(2, 3)), dim=-1)
    q[:, :, 0] = 0.0
    return torch.matmul(weights, values), q


def in_place(q, k, v, layer):
    keys, values = layer.update(k, v)
    scores = torch.matmul(q, keys.transpose(2, 3))
    kept = scores.view(scores.shape)
    scores *= 0.5
    return torch.matmul(nnf.softmax(scores, dim=-1), values), kept


REFUSED = {
    "other dimensions swapped": (
        reading(lambda x: x.transpose(0, 1).transpose(0, 1)),
        "other dimensions than the last two are swapped (at transpose)",
    ),
    "not swapped": (
        reading(lambda x: x[:, :, :16], swap=lambda x: x),
        "keys and values are not transposed as attention does (at matmul_1)",
    ),
    "heads tiled by views": (
        reading(
            lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, 2, -1, 16)[:, :, 0]
        ),
        "keys come from getitem, not from a cache update (at getitem_1)",
    ),
    "a view of channels": (
        reading(lambda x: x.reshape(1, 4, -1, 16).reshape(1, 2, 2, -1, 16).reshape(1, 4, -1, 16)),
        "the view does more than join batch and heads (at reshape_1)",
    ),
    "query changed": (late, "q is changed in place (at setitem)"),
    "scores changed": (in_place, "scores is changed in place and read elsewhere (at scores_1)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_decodes(name):
    function, reason = REFUSED[name]
    torch._dynamo.reset()
    _, decode = run(function, [20, 3], heads=(4, 4))
    assert decode.fired("fuse_attention") == 0
    found = {e.detail.split(": ", 1)[1] for e in decode.events if e.rule == "decode_reader"}
    assert found == {reason}


READS = {
    "contiguous": lambda x: x.contiguous(),
    "cast": lambda x: x.to(torch.float32).float(),
    "swapped three times": lambda x: x.transpose(2, 3).mT.contiguous(),
    "same view": lambda x: x.view(x.shape),
    "expanded to itself": lambda x: x.expand(1, 4, -1, 16),
}


@pytest.mark.parametrize("name", READS)
def test_numbers_agree(name):
    torch._dynamo.reset()
    _, decode = run(reading(READS[name]), [20, 3], heads=(4, 4))
    assert decode.fired("fuse_attention") == 1
