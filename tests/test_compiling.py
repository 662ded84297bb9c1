"""Compiled C++ libraries that are not whole: they are compiled anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvpass import _torch_cpp
from kvpass._torch_cpp import cpu_features, is_cut_off, load_cpp

SOURCE = 'extern "C" int kvpass_answer() { return 42; }\n'


def path_of(library: Any) -> Path:
    return Path(library._name)


@pytest.mark.parametrize("kept", [0, 3, 64, 0.5, 0.999])
def test_a_library_that_is_cut_off_is_compiled_anew(kept: float) -> None:
    first = load_cpp(SOURCE, ())
    path = path_of(first)
    whole = path.read_bytes()
    assert not is_cut_off(str(path))
    # Another file at its place: the one that is loaded must stay as it is.
    damaged = path.with_suffix(".damaged")
    damaged.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    os.replace(damaged, path)
    assert is_cut_off(str(path))
    _torch_cpp._code_cache().cache.clear()
    again = load_cpp(SOURCE, ())
    assert again.kvpass_answer() == 42
    assert path_of(again) == path
    assert not is_cut_off(str(path))


def test_code_is_for_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = path_of(load_cpp(SOURCE, ()))
    assert cpu_features()
    monkeypatch.setattr(_torch_cpp, "cpu_features", lambda: "none of this one's instructions")
    assert path_of(load_cpp(SOURCE, ())) != here
