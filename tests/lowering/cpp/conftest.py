"""Runs the generated C++ as it is for CPUs with other vectors than this one's."""

from __future__ import annotations

import pytest

from lowering.cpp import append, attend, library, pack, unpack

MODULES = (append, attend, pack, unpack)


@pytest.fixture(params=[4, 8, 16], ids=lambda n: f"{n}-lanes")
def lanes(request, monkeypatch):
    for module in (attend, library):
        monkeypatch.setattr(module, "native_lanes", lambda: request.param)
    for module in MODULES:
        module._function.cache_clear()
    yield request.param
    for module in MODULES:
        module._function.cache_clear()
