"""Writes into a packed cache tensor from outside compiled code raise: none is lost."""

from __future__ import annotations

import operator
import re

import pytest
import torch

from kvpass.errors import CacheStateError
from kvpass.format.parse import parse_plan
from kvpass.tensor.packed import PackedKV

PLAN = parse_plan("int4.token16/window=16,pack_every=1")
SHAPE = (1, 2, 40, 16)
ONES = torch.ones(SHAPE)


def assign(x):
    x[..., :10, :] = 0


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(0),
        lambda x: x.add_(1),
        lambda x: operator.iadd(x, 1),
        lambda x: x.copy_(ONES),
        lambda x: x.masked_fill_(ONES > 0, 0),
        lambda x: x.index_copy_(2, torch.tensor([1]), ONES[:, :, :1]),
        lambda x: x.detach().mul_(0),
        lambda x: x.data.mul_(0),
        lambda x: x.normal_(),
        lambda x: torch.add(ONES, 1, out=x),
        lambda x: torch.nn.functional.relu(x, inplace=True),
        lambda x: torch._foreach_mul_([x], 2),
        assign,
    ],
)
def test_a_write_is_refused(write):
    tokens = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    x = PackedKV.of_prompt(torch.ops.kvpass.pack(tokens, str(PLAN)), PLAN, 40, torch.float32)
    before = x.decode()
    message = f"would write into a packed cache tensor {SHAPE}, which only a step of the model"
    with pytest.raises(CacheStateError, match=re.escape(message)):
        write(x)
    assert torch.equal(x.decode(), before)
