"""Runs the generated C++ as it is for CPUs with other vectors than this one's."""

from __future__ import annotations

import pytest

from lowering.cpp import attention, library, linear

CACHES = (
    attention.kernel_function,
    attention.row_size,
    library.tensor_function,
    linear._function,
    linear._source,
)


@pytest.fixture(params=[4, 8, 16], ids=lambda n: f"{n}-lanes")
def lanes(request, monkeypatch):
    yield from _as_for(monkeypatch, request.param, tiles=0)


@pytest.fixture(params=[0, 2], ids=["own-tiles", "loops"])
def tiles(request, monkeypatch):
    """Matrices are multiplied in this CPU's tiles, if it has any, or in loops in their place."""
    loops = request.param
    lanes, own = library.native_lanes(), library.native_tiles()
    yield from _as_for(monkeypatch, 16 if loops else lanes, loops or own)


@pytest.fixture
def loops(monkeypatch):
    """They are multiplied in loops in the place of tiles."""
    yield from _as_for(monkeypatch, 16, tiles=2)


def _as_for(monkeypatch, lanes, tiles):
    for module in (attention, library, linear):
        monkeypatch.setattr(module, "native_lanes", lambda: lanes)
    for module in (attention, linear):
        monkeypatch.setattr(module, "native_tiles", lambda: tiles)
    for cached in CACHES:
        cached.cache_clear()
    yield lanes
    for cached in CACHES:
        cached.cache_clear()
