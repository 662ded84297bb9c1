"""Compiling C++ as Inductor does, through its private APIs."""

from __future__ import annotations

import platform
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

_empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class _DamagedLibraryError(Exception):
    """A compiled library was not whole, and is gone."""


@cache
def _code_cache() -> Any:
    """Inductor's cache of compiled C++, which trusts no library that is not whole: what a process
    that was killed, or a full disk, left there."""
    from torch._inductor.codecache import CppCodeCache

    class CheckedCodeCache(CppCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def _load_library(cls, path: str, key: str) -> Any:
            if is_cut_off(path):
                Path(path).unlink(missing_ok=True)
                raise _DamagedLibraryError
            return super()._load_library(path, key)

    return CheckedCodeCache


def is_cut_off(path: str) -> bool:
    """Whether a library in the ELF format ends before the table of its sections, which linkers
    write last."""
    length = Path(path).stat().st_size
    if sys.platform != "linux":
        return not length
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(length < table + size * count)


@cache
def cpu_features() -> str:
    """What this CPU can do, by the names that the system has for it: code is compiled for that."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith(("flags", "Features"))), "")


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """The library compiled from C++ ``source`` with Inductor's compiler, kept in its cache;
    ``flags`` come behind Inductor's own, so that they win. One that is damaged is compiled anew."""
    own, text = _code_cache(), f"{source}// The CPU has {cpu_features()}.\n"
    try:
        return own.load(text, extra_flags=tuple(flags))
    except _DamagedLibraryError:
        return own.load(text, extra_flags=tuple(flags))


def empty_cpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """An unwritten contiguous tensor, made as Inductor's code makes its own: in half the time."""
    _, heads, rows, columns = shape
    strides = (heads * rows * columns, rows * columns, columns, 1)
    made: torch.Tensor = _empty_strided_cpu(shape, strides, dtype)
    return made


# The attribute of an op that Inductor's code calls in its place.
DIRECT = "kvpass_direct"


def call_directly(ops: Iterable[OpOverload]) -> None:
    """Lets the code that Inductor generates call the functions `DIRECT` of these ops: for a few
    small tensors PyTorch's dispatcher takes as long as the work."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag

    def lowered(fallback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = len(V.graph.operations)
        results = fallback(*args, **kwargs)
        for kernel in V.graph.operations[made:]:
            if isinstance(kernel, ir.FallbackKernel):
                kernel.python_kernel_name = f"{kernel.python_kernel_name}.{DIRECT}"
        return results

    for op in ops:
        if op not in lowerings:
            # As Inductor itself does with an op that it does not know.
            tag = get_layout_constraint_tag(op, with_default=True)
            make_fallback(op, tag_to_layout_constraint(tag), warn=False)
            lowerings[op] = partial(lowered, lowerings[op])


CPP_PROBLEMS = ("no C++ compiler was found", "the C++ compiler refuses generated code")


def cpp_problem(error: BaseException) -> str | None:
    """The one of `CPP_PROBLEMS` that the error is, if any. (Inductor of torch 2.11 writes masks of
    a dynamic length in C++ that does not compile.)"""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InvalidCxxCompiler):
            return CPP_PROBLEMS[0]
        if isinstance(cause, CppCompileError):
            return CPP_PROBLEMS[1]
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return None
