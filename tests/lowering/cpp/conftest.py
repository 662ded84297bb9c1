"""Runs the generated C++ as it is for CPUs with other vectors than this one's."""

from __future__ import annotations

import pytest

from lowering.cpp import attention, library, linear

CACHES = (attention.kernel_function, library.tensor_function, linear._function, linear._source)


@pytest.fixture(params=[4, 8, 16], ids=lambda n: f"{n}-lanes")
def lanes(request, monkeypatch):
    for module in (attention, library, linear):
        monkeypatch.setattr(module, "native_lanes", lambda: request.param)
    for cached in CACHES:
        cached.cache_clear()
    yield request.param
    for cached in CACHES:
        cached.cache_clear()
