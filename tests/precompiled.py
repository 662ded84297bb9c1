"""The standard headers of kernels, read once for all kernels of a test run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, is_gcc
from torch._inductor.cpu_vec_isa import pick_vec_isa

from kvpass._torch_cpp import cpp_problem, trusted_vectors
from lowering.cpp import library

# The first header of every kernel that has vectors; GCC takes one of `<name>.gch` in its place.
_FIRST = "immintrin.h"
_OTHERS = ("algorithm", "cmath", "cstdint", "cstring", "limits", "type_traits", "utility", "vector")


def precompile(folder: Path) -> bool:
    """Fills a folder for `CPLUS_INCLUDE_PATH`; whether there is a compiler that can, and vectors
    that need it."""
    try:
        if not is_gcc() or library.native_lanes() == library._PLAIN_LANES:
            return False
    except Exception as error:
        if cpp_problem(error) is None:
            raise
        return False
    precompiled = folder / f"{_FIRST}.gch"
    precompiled.mkdir()
    # Where none of the precompiled ones fits.
    (folder / _FIRST).write_text(f"#include_next <{_FIRST}>\n")

    def build(flags: str) -> None:
        header = folder / f"{flags}.h"
        header.write_text("".join(f"#include <{name}>\n" for name in (_FIRST, *_OTHERS)))
        options = CppTorchDeviceOptions(
            vec_isa=isa, device_type="cpu", extra_flags=(flags, *library._FLAGS), precompiling=True
        )
        CppBuilder(name=str(header), sources=str(header), BuildOption=options).build()
        Path(f"{header}.gch").rename(precompiled / flags)

    with trusted_vectors():
        isa = pick_vec_isa()
        with ThreadPoolExecutor() as threads:
            list(threads.map(build, set(library._CONTRACTION.values())))
    return True
