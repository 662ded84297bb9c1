"""Shared set-up. Kernels are interpreted in a run of their own: the interpreter changes Triton at
import."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from kvpass.tensor.dispatch import DECODES
from tests.interpreter import patch_language_once
from tests.precompiled import precompile

settings.register_profile("kvpass", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("kvpass")
# What Dynamo keeps of operators' shapes gains nothing before a model has many layers, and most
# models here have one; nor do early collections of garbage, which each test ends with. (What runs
# in processes of its own keeps the defaults.)
torch._dynamo.config.fake_tensor_cache_enabled = False
torch._dynamo.config.run_gc_after_compile = False
gc.set_threshold(50_000, 20, 50)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    """Precompiles headers for a run of several processes, in the first of them: it takes seconds,
    which a few tests do not gain back. Kernels are interpreted faster in all of them."""
    starts = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if INTERPRETED:
        patch_language_once()
    elif starts:
        folder = tempfile.TemporaryDirectory(prefix="kvpass-tests-")
        config.add_cleanup(folder.cleanup)
        if precompile(Path(folder.name)):
            os.environ["CPLUS_INCLUDE_PATH"] = folder.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [i for i in items if (i.get_closest_marker("interpreter") is not None) == INTERPRETED]
    config.hook.pytest_deselected(items=[i for i in items if i not in wanted])
    items[:] = wanted


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    DECODES.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield
    torch._dynamo.reset()
    # What compilers keep, a million objects in the end, is not looked through by each collection.
    gc.collect()
    gc.freeze()
