"""Hadamard matrices of all orders that heads have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kvpass.format.hadamard import hadamard

# The sizes of heads, and what Paley's constructions are needed for.
HEADS = (2, 12, 20, 24, 28, 36, 64, 80, 96, 112, 120, 128, 160, 192, 256, 576)


@pytest.mark.parametrize("dim", HEADS)
def test_all_elements_are_equal_but_for_their_signs(dim: int) -> None:
    assert_close(hadamard(dim).abs(), torch.full((dim, dim), dim**-0.5, dtype=torch.float64))


@given(st.integers(1, 200), st.none() | st.integers(0, 9))
def test_matrices_are_orthogonal(dim: int, seed: int | None) -> None:
    found = hadamard(dim, seed)
    assert_close(found @ found.T, torch.eye(dim, dtype=torch.float64))
    assert torch.equal(found, hadamard(dim, seed))


def test_orders_without_a_construction_are_made_of_blocks() -> None:
    found = hadamard(100)
    assert_close(found[:20, :20], hadamard(20))
    assert_close(found[80:, 80:], hadamard(20))
    assert not found[:20, 20:].any()


@pytest.mark.parametrize("group", [16, 32, 64])
def test_the_first_rows_are_constant_within_groups(group: int) -> None:
    rows = hadamard(64)[: 64 // group].unflatten(1, (-1, group))
    assert torch.equal(rows, rows[..., :1].expand_as(rows))
