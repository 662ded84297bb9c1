"""The larger model of the examples: what it is, and what it remembers."""

from __future__ import annotations

from typing import Any

import pytest

from examples.quickstart import LARGER_MODEL, load
from examples.train_small_model import recall_accuracy


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load(str(LARGER_MODEL), "float32")


def test_it_fits_into_12_megabytes(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert sum(file.stat().st_size for file in LARGER_MODEL.iterdir()) < 12e6
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 4096


@pytest.mark.parametrize(("tokens", "least"), [(2048, 0.95), (4096, 0.9)])
def test_it_finds_values_again(loaded: tuple[Any, Any], tokens: int, least: float) -> None:
    """Of 16 questions, behind a document and as many answers as are asked for."""
    assert recall_accuracy(*loaded, tokens - 4 * 7, n_documents=4) >= least
