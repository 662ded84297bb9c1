"""Channels with like ranges share a group, and what is rotated together stays together."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.calibration.channels import cluster
from kvpass.calibration.clipping import ClipSearch
from kvpass.calibration.ordering import OrderSearch, _groups
from kvpass.calibration.samples import AttentionSample
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError
from kvpass.format.codec import Codec
from kvpass.format.groups import Groups
from kvpass.format.retention import RetentionPolicy
from kvpass.format.rope import Rope
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan
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
def test_channels_of_like_ranges_share_a_group(rotations):
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
    order, found = cluster(features, codec(8), rotations, 0)
    assert found.half_split == (rotations == HALVES)
    assert found.sizes == (8,) * 6
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
)
def test_orders_keep_what_is_rotated_together(seed, group, rotated, kind):
    rotations = (Rope(kind, 0, rotated),) if rotated else ()
    if 0 < rotated < 16:
        with pytest.raises(OptionError, match="Groups of unequal size are not supported where"):
            cluster(randn(2, 16, 2, seed=seed), codec(group), rotations, 0)
    plan = LayerPlan(*[TensorPlan(codec(group), RetentionPolicy(4, 1, 2))] * 2)
    search = OrderSearch(plan, 100, seed)
    search.add(random_sample(seed, rotations))
    found = search.ordered()
    ordered = [(found.key_basis, found.keys.codec)]
    if rotated in (0, 16):
        ordered.append(cluster(randn(2, 16, 2, seed=seed), codec(group), rotations, 0))
    for order, stored in ordered:
        inside = order.tensor()[:, :rotated]
        assert (inside < rotated).all()
        assert rotated == 0 or (keeps_halves if kind == "halves" else keeps_neighbours)(inside)
        groups = Groups("token", group, stored.half_split, stored.sizes)
        assert groups.unsupported_reason(16, 2) is None


def random_sample(seed: int, rotations=(), wide=None) -> AttentionSample:
    """Two heads of 16 channels, 40 tokens; ``wide`` scales the channels of keys."""
    q, keys, values = (randn(2, n, 40, 16, seed=seed + n) for n in (4, 2, 3))
    values = values[:, :2]
    if wide is not None:
        keys = keys * wide
        # One of each eight lies elsewhere.
        values = values + torch.tensor([20.0] + [0.0] * 7).repeat(2)
    more = {"mask": None, "scale": 0.25, "sinks": None, "causal": True, "softcap": 0.0}
    return AttentionSample("layer", q, keys, values, rotations=rotations, before_rope=keys, **more)


def test_balanced_groups_lessen_the_error_that_queries_see():
    """Keys of two widths lie side by side, of which queries read half, and values of two means."""
    plan = LayerPlan(*[TensorPlan(codec(8), RetentionPolicy(4, 1, 2))] * 2)
    every = random_sample(0, wide=torch.tensor([1.0, 5.0]).repeat(8))
    # Few attend to one token alone.
    every = replace(every, q=every.q / 10)
    half = replace(every, q=every.q * torch.tensor([1.0, 1.0, 0.0, 0.0]).repeat(4))

    def ordered(sample: AttentionSample) -> LayerPlan:
        search = OrderSearch(plan, 76, 0)
        search.add(sample)
        return search.ordered()

    def error(found: LayerPlan, kind: str) -> float:
        search = ClipSearch(found, 0, (1.0,))
        search.add(half)
        return search.error(kind)

    assert error(ordered(half), "keys") < 0.9 * error(ordered(every), "keys")
    assert error(ordered(half), "values") < 0.6 * error(plan, "values")


def test_no_swap_of_two_channels_is_better():
    """Against every swap, by the sum over groups of mean squared widths times weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 12, generator=generator) * torch.rand(12, generator=generator).exp()
    weights = torch.rand(12, generator=generator)

    def error(labels: torch.Tensor) -> float:
        total = 0.0
        for group in range(3):
            members = x[:, labels == group]
            width = members.amax(1) - members.amin(1)
            total += float((width**2).mean() * weights[labels == group].sum())
        return total

    labels = _groups(x, weights, torch.arange(12).unsqueeze(1), 4)
    assert labels.bincount().tolist() == [4, 4, 4]
    assert error(labels) < error(torch.arange(12) // 4)
    for i, j in itertools.combinations(range(12), 2):
        other = labels.clone()
        other[i], other[j] = labels[j], labels[i]
        assert error(other) >= (1 - 2e-4) * error(labels)


def test_one_group_has_no_order():
    for heads, group in ((1, 16), (2, 32)):
        found = cluster(randn(heads, 16, 2), codec(group), (), 0)
        assert found == (None, codec(group))


def test_equal_channels_are_cut_anywhere():
    _, found = cluster(torch.ones(2, 16, 2), codec(4), (), 0)
    assert found.sizes == (4,) * 8


def test_without_scikit_learn_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr("kvpass.errors.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs scikit-learn, which is not installed: pip"):
        cluster(randn(1, 16, 2), codec(4), (), 0)
