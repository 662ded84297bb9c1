"""Errors over texts, and ties."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvpass.evaluate.estimates import Estimate, estimate, ranking


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_error_of_texts_of_one_length_is_that_of_their_means() -> None:
    found = estimate(of(10, 20, 60), of(10, 10, 10))
    means = of(1, 2, 6)
    assert found.mean == 3
    assert found.error == pytest.approx(float(means.std()) / math.sqrt(3))


def test_error_of_unequal_texts_is_that_of_a_ratio() -> None:
    # By hand: the mean is 8 / 4; texts are off by 2 - 1 * 2 = 0, 0 - 2 = -2 and 6 - 4 = 2.
    found = estimate(of(2, 0, 6, 7), of(1, 1, 2, 0))
    assert found.mean == 2
    assert found.error == pytest.approx(math.sqrt((0 + 4 + 4) * 3 / 2) / 4)


def test_one_text_says_nothing_of_its_error() -> None:
    found = estimate(of(3), of(2))
    assert found.mean == 1.5
    assert math.isnan(found.error)
    assert not found.certain
    assert math.isnan(estimate(of(0), of(0)).mean)


def test_a_difference_of_logarithms_is_a_relative_change() -> None:
    found = Estimate(math.log(2), 0.01).percent
    assert (found.mean, found.error) == (pytest.approx(100), pytest.approx(2))


def test_neighbours_are_compared_over_the_same_tokens() -> None:
    """Texts differ by far more than recipes, which a difference by text does not see."""
    counts, easy = of(10, 10, 10), of(0, 100, 200)
    totals = {"worse": easy + of(9, 11, 10), "base": easy, "equal": easy + of(3, -2, 0)}
    found = ranking(totals, counts)
    assert list(found) == ["base", "equal", "worse"]
    (_, none), (_, tie), (value, behind) = found.values()
    assert none is None
    assert tie is not None
    assert not tie.certain
    assert behind is not None
    assert behind.certain
    # Of 6, 13 and 10 more in ten tokens.
    assert behind.mean == pytest.approx(29 / 30)
    assert behind.error == pytest.approx(float(of(0.6, 1.3, 1).std()) / math.sqrt(3))
    assert value.error > 4
