"""What all processes of a test run share, and one of them makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder ``name``, which the first process to ask for it fills, and the others wait for."""
    run = factory.getbasetemp()
    # The workers of a run have folders of their own in its folder.
    folder = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / name
    made = folder / "made"
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            made.touch()
    return folder
