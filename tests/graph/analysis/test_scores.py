"""Steps between the scores and the softmax: identities, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf

from kvpass.recipes import recipe
from tests.graph.recorder import run

LOW = torch.finfo(torch.float32).min
EVEN = torch.arange(200) % 2 == 0


def attention(steps):
    """Attention with ``steps(scores)`` in front of its softmax."""

    def attend(q, k, v, layer):
        keys, values = layer.update(k, v)
        scores = torch.matmul(q, keys.transpose(2, 3))
        return torch.matmul(nnf.softmax(steps(scores), dim=-1), values)

    return attend


def even(scores):
    return EVEN[: scores.shape[3]].expand(1, 1, scores.shape[2], -1)


def row(scores):
    return torch.arange(float(scores.shape[3])).expand(scores.shape[2], -1) / 7


REFUSED = {
    "negative factor": (lambda s: s * -1.0, "scores are multiplied by -1 (at mul)"),
    "a small fill": (
        lambda s: s.masked_fill(even(s), -10000.0),
        "hidden scores become -10000, which is not low enough to absorb a score (at masked_fill)",
    ),
    "a high floor": (
        lambda s: torch.max(s, torch.tensor(-1.0)),
        "scores are at least -1.0, which is not low enough to absorb a score (at max_1)",
    ),
    "a fill made small": (
        lambda s: s.masked_fill(even(s), LOW) * 1e-30,
        "hidden scores are multiplied by 1e-30 (at mul)",
    ),
    "capped twice": (
        lambda s: torch.tanh(torch.tanh(s)),
        "tanh of scores that are masked or capped already (at tanh_1)",
    ),
    "capped behind the mask": (
        lambda s: torch.tanh(s + row(s)),
        "tanh of scores that are masked or capped already (at tanh)",
    ),
    "one column": (
        lambda s: s + row(s)[:, 1:2],
        "the mask has one column for all tokens (at add)",
    ),
    "a number": (lambda s: s + torch.tensor(2.0), "the mask has 0 dimensions (at add)"),
    "scaled addend": (lambda s: torch.add(s, row(s), alpha=2.0), "add with alpha (at add)"),
    "another maximum": (
        lambda s: s - (s * 2.0).max(dim=-1, keepdim=True).values,
        "another tensor is subtracted (at sub)",
    ),
    "an unknown step": (lambda s: s.sin(), "sin, expected matmul (at sin)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_decodes(name):
    steps, reason = REFUSED[name]
    torch._dynamo.reset()
    _, decode = run(attention(steps), [20, 3], heads=(4, 4))
    assert decode.fired("fuse_attention") == 0
    found = {e.detail.split(": ", 1)[1] for e in decode.events if e.rule == "decode_reader"}
    assert found == {reason}


def shown(s):
    return torch.where(even(s), s, LOW)


EXACT = {
    "hidden rows average": lambda s: s.masked_fill(even(s) | ~even(s), LOW),
    "shown": shown,
    "hidden, then a bias": lambda s: shown(s) + row(s),
    "a bias, then hidden": lambda s: shown(s + row(s)),
    "hidden twice": lambda s: shown(s).masked_fill(~even(s), LOW),
    "shown or minus infinity": lambda s: torch.where(even(s), s, -torch.inf),
    "scaled, capped, biased, scaled": lambda s: (torch.tanh(s / 3.0) * 2.0 + row(s)) * 0.5,
    "floor": lambda s: torch.maximum(s + torch.where(even(s), 0.0, -torch.inf), torch.tensor(LOW)),
    "shift": lambda s: s - s.amax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_numbers_agree(name):
    torch._dynamo.reset()
    kivi = recipe("kivi-2bit", group=8, residual=8)
    _, decode, verify = run(attention(EXACT[name]), [20, 1, 3], kivi, heads=(4, 4), batch=2)
    assert decode.fired("fuse_attention") == verify.fired("fuse_attention") == 1
