"""The headers are C++ that stands alone."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lowering.cpp import library

FOLDER = library.FOLDER
HEADERS = sorted(FOLDER.glob("*.h"))


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.stem)
def test_header_stands_alone(header, tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "a C++ compiler is needed"
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n')
    flags = ("-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-Wno-psabi")
    # Functions that a header defines are used by others.
    flags += ("-Wno-unused-function", "-Wno-unknown-pragmas")
    result = subprocess.run([compiler, *flags, str(source)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
