"""`ChannelOrder` and `ChannelRotation`, and cache tensors that hold their channels so."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kvpass import ChannelOrder, ChannelRotation, LayerPlan, PackedKV
from kvpass.errors import PlanError
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import decode, encode
from kvpass.ops import logical
from kvpass.oracle import OracleLayer
from kvpass.tensor.dispatch import DECODES
from tests.bases import free, rotation
from tests.strategies import randn
from tests.tensor.test_packed import KEYS, NATIVE, VALUES, equal
from tests.tolerances import ROTATED

ORDER = ChannelOrder.of(free(2, 16, torch.Generator().manual_seed(5)))
ROTATION = rotation(2, 16, torch.Generator().manual_seed(5))
TOKENS = "int2.token8/window=0,pack_every=1"


def ordered(plan: str, x: torch.Tensor) -> PackedKV:
    return logical.append(None, ORDER.store(x), plan, False, ORDER.tensor())


def test_orders_are_values():
    same = ChannelOrder.of(ORDER.tensor().clone())
    assert same == ORDER
    assert hash(same) == hash(ORDER)
    assert copy.deepcopy(ORDER) == pickle.loads(pickle.dumps(ORDER)) == ORDER
    assert ORDER.tensor().dtype == torch.int64
    assert ChannelOrder.of(free(2, 16, torch.Generator().manual_seed(6))) != ORDER
    assert (ORDER.heads, ORDER.dim) == (2, 16)
    assert repr(ORDER).startswith("ChannelOrder(2x16, ")
    x = randn(2, 2, 3, 16)
    assert torch.equal(ORDER.restore(ORDER.store(x)), x)
    assert torch.equal(ORDER.store(x)[0, 1, 0], x[0, 1, 0][ORDER.tensor()[1]])


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (torch.arange(4), "A channel order is int64 [4]; allowed: int64 [heads, channels]."),
        (torch.eye(4), "A channel order is float32 [4, 4]; allowed: int64 [heads, channels]."),
        ([[0, 1]], "A channel order is list; allowed: int64 [heads, channels]."),
        (torch.zeros(0, 4).long(), "A channel order is int64 [0, 4], which fits no attention"),
        (torch.zeros(2, 0).long(), "A channel order is int64 [2, 0], which fits no attention"),
        (torch.tensor([[0, 1], [1, 1]]), "no permutation: each row must hold 0 to 1 once."),
        (torch.tensor([[0, 2]]), "no permutation: each row must hold 0 to 1 once."),
        (torch.tensor([[0, -1]]), "no permutation: each row must hold 0 to 1 once."),
    ],
)
def test_bad_orders_are_one_sentence(order, sentence):
    with pytest.raises(PlanError) as caught:
        ChannelOrder.of(order)
    assert sentence in str(caught.value)


def test_rotations_are_values():
    same = ChannelRotation.of(ROTATION.tensor().clone())
    assert same == ROTATION
    assert hash(same) == hash(ROTATION)
    assert copy.deepcopy(ROTATION) == pickle.loads(pickle.dumps(ROTATION)) == ROTATION
    assert (ROTATION.heads, ROTATION.dim, ROTATION.tensor().dtype) == (2, 16, torch.float32)
    assert ChannelRotation.of(ROTATION.tensor().transpose(1, 2)) != ROTATION
    assert repr(ROTATION).startswith("ChannelRotation(2x16, ")
    x = randn(2, 2, 3, 16)
    wanted = torch.einsum("bhti,hij->bhtj", x, ROTATION.tensor())
    torch.testing.assert_close(ROTATION.store(x), wanted, rtol=0, atol=ROTATED)
    torch.testing.assert_close(ROTATION.restore(wanted), x, rtol=0, atol=ROTATED)
    assert ROTATION.store(x.bfloat16()).dtype == torch.bfloat16
    # One matrix for all heads fits any number of them.
    one = ChannelRotation.of(ROTATION.tensor()[:1])
    assert one.unsupported_reason(5, 16) is None
    assert one.unsupported_reason(5, 8) is not None
    assert ROTATION.unsupported_reason(5, 16) is not None


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        (torch.eye(4), "A channel rotation is float32 [4, 4]; allowed: floating [heads, D, D]."),
        (torch.ones(2, 3, 4), "A channel rotation is float32 [2, 3, 4]; allowed: floating"),
        (torch.zeros(1, 2, 2).long(), "A channel rotation is int64 [1, 2, 2]; allowed: floating"),
        (torch.zeros(0, 4, 4), "A channel rotation is float32 [0, 4, 4]; allowed: floating"),
        ([[[1.0]]], "A channel rotation is list; allowed: floating [heads, D, D]."),
        (2 * torch.eye(4)[None], "is not orthogonal: R @ R.T differs from 1 by 3."),
        (torch.full((1, 2, 2), torch.nan), "is not orthogonal: R @ R.T differs from 1 by nan."),
    ],
)
def test_bad_rotations_are_one_sentence(matrix, sentence):
    with pytest.raises(PlanError) as caught:
        ChannelRotation.of(matrix)
    assert sentence in str(caught.value)


def test_operations_on_rotated_tensors_are_in_the_models_basis():
    x, new = randn(2, 2, 37, 16), randn(2, 2, 3, 16, seed=1)
    packed = logical.append(None, ROTATION.store(x), "fp", False, ROTATION.tensor())
    joined = torch.cat([packed, new], dim=2)
    assert joined.basis == ROTATION
    wanted = torch.cat([x, new], dim=2)
    torch.testing.assert_close(joined.decode(), wanted, rtol=0, atol=ROTATED)
    torch.testing.assert_close(joined[:, :, :5].clone().decode(), x[:, :, :5], rtol=0, atol=ROTATED)


@pytest.mark.parametrize("plan", ["fp", KEYS, VALUES, TOKENS])
@pytest.mark.parametrize("op", NATIVE.values(), ids=NATIVE)
def test_operations_are_in_the_models_order(op, plan):
    """What an operation gives of a tensor in an order is what it gives of one in none, exactly,
    where groups of channels are the same in both."""
    x = randn(2, 2, 37, 16)
    source = ordered(plan, x)
    assert source.basis == ORDER
    result = op(source)
    assert isinstance(result, PackedKV)
    assert result.basis == ORDER
    # The same on permuted channels, without kvpass knowing of it.
    other = logical.append(None, ORDER.store(x), plan)
    if op in [NATIVE[name] for name in ("cat", "cat of three")]:
        count = 3 if op is NATIVE["cat"] else 4
        news = randn(2, 2, 3, 16, seed=5 if count == 3 else 0)
        parts = [news] if count == 3 else [news, randn(2, 2, 1, 16)]
        wanted = torch.cat([other, *(ORDER.store(part) for part in parts)], dim=2)
    else:
        wanted = op(other)
    equal(result, ORDER.restore(wanted.decode()))
    assert not DECODES


def test_plain_operations_decode_to_the_models_order():
    x = randn(2, 2, 5, 16)
    with pytest.warns(UserWarning, match="decoded a packed cache tensor"):
        assert torch.equal(ordered("fp", x) * 2, x * 2)


def test_rows_of_other_orders_do_not_join_packed():
    x = randn(2, 2, 5, 16)
    other = logical.append(None, x, "fp")
    with pytest.warns(UserWarning, match="decoded a packed cache tensor"):
        joined = torch.cat([ordered("fp", x), other])
    assert torch.equal(joined, torch.cat([x, x]))


def test_static_writes_are_in_the_models_order():
    plan = "fp/window_size=7/room=8"
    x, new = randn(1, 2, 3, 16), randn(1, 2, 2, 16, seed=1)
    packed = ordered(plan, x)
    packed.index_copy_(2, torch.tensor([3, 4]), new)
    wanted = torch.cat([x, new, torch.zeros(1, 2, 3, 16)], dim=2)
    equal(packed, wanted)


def test_the_oracle_rounds_permuted_channels():
    plan = parse_plan(TOKENS)
    layer = OracleLayer(LayerPlan(plan, plan, key_basis=ORDER))
    x = randn(1, 2, 40, 16)
    layer.update(x, x)
    codec = plan.codec
    wanted = ORDER.restore(decode(codec, encode(codec, ORDER.store(x)), x.dtype))
    assert torch.equal(layer.keys, wanted)
    assert torch.equal(layer.values, decode(codec, encode(codec, x), x.dtype))
    equal(ordered(TOKENS, x), wanted)
