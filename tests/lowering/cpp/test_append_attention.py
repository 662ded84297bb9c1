"""A decode step in C++ whose new keys and query are brought to the keys' basis by its kernels."""

from __future__ import annotations

import pytest
import torch

from kvpass.format.parse import parse_plan
from kvpass.tensor.packed import PackedKV
from lowering.cpp.append_attention import append_attention, unsupported_reason
from tests.tolerances import CPP_ATTENTION

ops = torch.ops.kvpass
HEADS, PROMPT, DIM = 2, 40, 80
PLAN = "int4.token20/sinks=2,window=4,pack_every=1"


def step(basis: torch.Tensor, new: int, dtype: torch.dtype = torch.float32):
    """The arguments of the op twice, with states of their own."""
    generator = torch.manual_seed(3)

    def tokens(heads: int, count: int) -> torch.Tensor:
        return torch.randn(2, heads, count, DIM, generator=generator).to(dtype)

    plan, states = parse_plan(PLAN), []
    for _ in range(2):
        x = tokens(HEADS, PROMPT)
        packed = PackedKV.of_prompt(list(ops.pack(x, PLAN)), plan, PROMPT, dtype)
        packed.reserve(new)
        states.append(packed.state)
    copies = [[[t.clone() for t in state] for state in states] for _ in range(2)]
    first = (tokens(HEADS, new), tokens(HEADS, new), *[None] * 4, basis, tokens(3 * HEADS, new))
    return [(*first, *copy, None, 0.2, PLAN, PLAN, None, True) for copy in copies]


def rotation(heads: int, blocks: int) -> torch.Tensor:
    size = DIM // blocks
    matrices = torch.randn(1, heads, 1, blocks, size, size, generator=torch.manual_seed(1))
    return torch.linalg.qr(matrices)[0].contiguous()


# Of all heads and of each one; of all channels and of blocks, which vectors fill or not; for few
# query rows and for many.
@pytest.mark.parametrize(
    ("heads", "blocks", "new"), [(1, 1, 1), (HEADS, 1, 5), (HEADS, 4, 1), (HEADS, 5, 1)]
)
def test_it_is_the_reference(heads: int, blocks: int, new: int) -> None:
    dtype = torch.float32
    arguments, reference = step(rotation(heads, blocks), new, dtype)
    assert unsupported_reason(*arguments) is None
    wanted = ops.append_attention(*reference)
    # Inductor names the arguments that have defaults.
    got = append_attention(*arguments[:-2], sinks=None, causal=True)
    error = (got - wanted).float().norm() / wanted.float().norm()
    assert error <= CPP_ATTENTION[dtype]
    tokens = PROMPT + new
    for i in (8, 9):
        found, expected = (ops.unpack(x[i], tokens, PLAN, dtype) for x in (arguments, reference))
        difference = (found - expected).float().norm() / expected.float().norm()
        assert difference <= (CPP_ATTENTION[dtype] if i == 8 else 0)


def test_numbers_are_rounded_to_the_dtype_of_the_model() -> None:
    """Channels in another order, with other signs, are what they were."""
    order = torch.randperm(80, generator=torch.manual_seed(2))
    basis = torch.eye(80)[order] * torch.tensor([1.0, -1.0]).repeat(40)
    arguments, reference = step(basis.view(1, 1, 1, 1, DIM, DIM), 1, torch.bfloat16)
    wanted, got = ops.append_attention(*reference), append_attention(*arguments)
    error = (got - wanted).float().norm() / wanted.float().norm()
    assert error <= CPP_ATTENTION[torch.bfloat16]
    for states in zip(arguments[8:10], reference[8:10], strict=True):
        found, expected = (ops.unpack(x, PROMPT + 1, PLAN, torch.bfloat16) for x in states)
        assert torch.equal(found, expected)


def test_declined() -> None:
    arguments, _ = step(rotation(1, 1), 1)

    def reason(**changes: object) -> str | None:
        names = ("new_keys", "new_values", "cos_sin", "rope", "k_clip", "v_clip", "basis")
        changed = [changes.get(name, x) for name, x in zip(names, arguments[:7], strict=True)]
        return unsupported_reason(*changed, *arguments[7:])

    assert str(reason(basis=None)).endswith("where nothing is rotated")
    assert reason(cos_sin=torch.ones(1, 1, 80), rope="halves0-80") == (
        "keys get their rotary embedding and a basis"
    )
    for basis in (rotation(3, 1), rotation(1, 1).double()):
        assert str(reason(basis=basis)).endswith("is not one of 2 heads")
