"""Rotations from moments, and the levels of what they make of channels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from kvpass import LayerPlan
from kvpass.calibration.levels import gaussian_levels
from kvpass.calibration.rotations import RotationSearch, eigen_rotation
from kvpass.calibration.samples import STORED, AttentionSample, windowed
from kvpass.calibration.scores import rounded
from kvpass.format.codec import Codec
from kvpass.format.parse import parse_plan
from kvpass.format.quantize import fake_quantize
from tests.strategies import randn

DIM, TOKENS = 32, 96
PLAN = parse_plan("int2.token16/sinks=2,window=0,pack_every=1")
STORED_SO = LayerPlan(PLAN, PLAN)


def anisotropic(seed: int) -> AttentionSample:
    """Two channels that are large, one that is constant, and sinks unlike the other tokens."""
    q, keys, values = (
        randn(2, heads, TOKENS, DIM, seed=seed + i) for i, heads in enumerate((4, 2, 2))
    )
    for x in (keys, values):
        x[..., 3:5] *= 6
        x[..., 7] += 10
        x[:, :, :2] = 50
    plain = {"mask": None, "scale": 0.1, "sinks": None, "causal": True, "softcap": 0.0}
    return AttentionSample("layer", q, keys, values, rotations=(), before_rope=keys, **plain)


def searched() -> LayerPlan:
    search = RotationSearch(STORED_SO)
    for seed in (10, 20, 30):
        search.add(anisotropic(seed))
    keys, values = (search.rotation(kind) for kind in STORED)
    return replace(STORED_SO, key_basis=keys, value_basis=values)


@pytest.mark.parametrize("kind", STORED)
def test_rotations_lower_the_errors_of_attention(kind: str) -> None:
    sample = anisotropic(0)

    def error(plan: LayerPlan) -> float:
        read = {k: getattr(sample, k) for k in STORED}
        read[kind] = rounded(plan, kind, read[kind])
        exact, found = (
            windowed(sample, *pair, (0, 0))
            for pair in ((sample.keys, sample.values), (read["keys"], read["values"]))
        )
        return float((found - exact).norm())

    # Measured: 0.36 of it for keys, 0.41 for values.
    assert error(searched()) < 0.6 * error(STORED_SO)


def test_equal_samples_make_equal_rotations() -> None:
    first, second = searched(), searched()
    assert first == second
    assert first.key_basis != first.value_basis


def test_axes_come_by_their_moments_and_each_channel_has_its_share() -> None:
    moments = torch.diag(torch.tensor([1.0, 9.0, 4.0, 2.0])).expand(2, 4, 4)
    rotation = eigen_rotation(moments).tensor()
    # The largest axis, whose sign is free, is the same in all channels.
    assert_close(rotation[:, 1], torch.full((2, 4), 0.5))
    shares = (rotation.transpose(1, 2) @ moments @ rotation).diagonal(dim1=1, dim2=2)
    assert_close(shares, torch.full((2, 4), 4.0))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_have_less_error_than_evenly_spaced_ones(bits: int) -> None:
    even, x = Codec(bits, "token", 64), randn(1, 1, 2000, 64, seed=3)
    levels = gaussian_levels(bits, 64)
    assert levels == tuple(-level for level in reversed(levels))

    def error(codec: Codec) -> float:
        return float((fake_quantize(codec, x) - x).square().mean())

    clips = [error(replace(even, clip=alpha / 20)) for alpha in range(10, 21)]
    assert error(replace(even, codebook=levels)) < min(clips)
