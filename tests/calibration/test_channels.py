"""Channels with like ranges share a group, and what is rotated together stays together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.calibration import channels
from kvpass.calibration.channels import cluster
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError
from kvpass.format.codec import Codec
from kvpass.format.groups import Groups
from kvpass.format.rope import Rope
from kvpass.rules.basis.rotary import keeps_halves, keeps_neighbours
from tests.strategies import SEEDS, randn

HALVES, NEIGHBOURS = (Rope("halves", 0, 16),), (Rope("neighbours", 0, 16),)


def test_ranges_leave_out_the_first_tokens():
    ranges = Thresholds(0, 11, skip=2)
    x, y = randn(2, 3, 5, 4, seed=1), randn(1, 3, 7, 4, seed=2)
    for tensor in (x, y):
        tensor[:, :, :2] = 100
        ranges.add(tensor)
    ranges.add(torch.full((1, 3, 2, 4), 200.0))
    tokens = torch.cat([t[:, :, 2:].transpose(1, 2).flatten(0, 1) for t in (x, y)])
    low, high = ranges.bounds()
    assert torch.equal(low, tokens.amin(0))
    assert torch.equal(high, tokens.amax(0))


def test_ranges_of_nothing_are_refused():
    with pytest.raises(OptionError, match="No text is longer than 5 tokens"):
        Thresholds(0, 0, skip=5)


def codec(group: int) -> Codec:
    return Codec(2, "token", group)


@pytest.mark.parametrize("rotations", [(), HALVES, NEIGHBOURS], ids=["free", "halves", "pairs"])
@pytest.mark.parametrize("balanced", [True, False])
def test_channels_of_like_ranges_share_a_group(rotations, balanced):
    """Two kinds of channels, mixed up in another way in each head."""
    generator = torch.Generator().manual_seed(0)
    features = torch.empty(3, 16, 2)
    for head in features:
        # A pair is of one kind.
        kind = torch.randperm(8, generator=generator) % 2
        if rotations == NEIGHBOURS:
            wide = kind.repeat_interleave(2)
        else:
            wide = kind.repeat(2) if rotations else torch.randperm(16, generator=generator) % 2
        head[:, 1] = 1 + 9.0 * wide + 0.1 * torch.rand(16, generator=generator)
        head[:, 0] = -head[:, 1]
    order, found = cluster(features, codec(8), rotations, 0, balanced)
    assert found.half_split == (rotations == HALVES)
    assert found.sizes == (None if balanced else (8,) * 6)
    members = Groups("token", 8, found.half_split, found.sizes).members(3, 16)
    stored = features[:, :, 1].gather(1, order.tensor())
    for head in range(3):
        # The narrow ones come first.
        assert stored[head][members[head] == 0].max() < 2
        assert stored[head][members[head] == 1].min() > 9


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    group=st.sampled_from([2, 4, 8]),
    rotated=st.sampled_from([0, 4, 8, 16]),
    kind=st.sampled_from(["halves", "neighbours"]),
    balanced=st.booleans(),
)
def test_orders_keep_what_is_rotated_together(seed, group, rotated, kind, balanced):
    rotations = (Rope(kind, 0, rotated),) if rotated else ()
    if not balanced and 0 < rotated < 16:
        with pytest.raises(OptionError, match="Groups of unequal size are not supported where"):
            cluster(randn(2, 16, 2, seed=seed), codec(group), rotations, 0, balanced)
        return
    order, found = cluster(randn(2, 16, 2, seed=seed), codec(group), rotations, 0, balanced)
    inside = order.tensor()[:, :rotated]
    assert (inside < rotated).all()
    assert rotated == 0 or (keeps_halves if kind == "halves" else keeps_neighbours)(inside)
    groups = Groups("token", group, found.half_split, found.sizes)
    assert groups.unsupported_reason(16, 2) is None


def test_one_group_has_no_order():
    for heads, group in ((1, 16), (2, 32)):
        found = cluster(randn(heads, 16, 2), codec(group), (), 0, balanced=True)
        assert found == (None, codec(group))


def test_equal_channels_are_cut_anywhere():
    _, found = cluster(torch.ones(2, 16, 2), codec(4), (), 0, balanced=False)
    assert found.sizes == (4,) * 8


def test_without_scikit_learn_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(channels, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs scikit-learn, which is not installed: pip"):
        cluster(randn(1, 16, 2), codec(4), (), 0, balanced=True)
