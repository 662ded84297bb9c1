"""Compiling C++ as Inductor does, through its private APIs."""

from __future__ import annotations

import platform
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

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


def start_cpp(source: str, flags: Sequence[str]) -> Callable[[], Any]:
    """Begins to compile C++ ``source`` with Inductor's compiler, in one of its threads (where it
    has but one, on waiting), unless it is in Inductor's cache; ``flags`` come behind Inductor's
    own, so that they win.

    Returns:
        What waits for the library. One that is damaged is compiled anew.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    text = f"{source}// The CPU has {cpu_features()}.\n"
    with trusted_vectors():
        # With one thread, submitting is compiling, under a lock that compiling takes again.
        submit = AsyncCompile.submit if get_compile_threads() > 1 else None
        made = _code_cache().load_async(text, extra_flags=tuple(flags), submit_fn=submit)

    def wait() -> Any:
        try:
            return made()
        except _DamagedLibraryError:
            return made()

    return wait


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """The library of `start_cpp`."""
    return start_cpp(source, flags)()


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


# All that a kernel's source has but one function `kernel`: what else there is could meet its like.
_KERNEL = re.compile(r'\s*#include <[^>]+>\s*extern "C"\s+void\s+kernel\(')
# As `CppPythonBindingsCodeCache` binds one function.
_BINDING = """
static PyObject* call_kernel_{number}(PyObject*, PyObject* args) {{{{
  try {{{{
    if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {count})
      throw std::runtime_error("requires a tuple of {count} args");
    kernel_{number}({arguments});
    Py_RETURN_NONE;
  }}}} catch (std::exception const& error) {{{{
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }}}}
}}}}
static PyMethodDef method_{number} = {{{{
  "kernel_{number}", call_kernel_{number}, METH_VARARGS, ""
}}}};
"""


class _Batch:
    """The kernels of one graph, compiled together: a compiler's start, and reading its headers,
    take most of the time of each."""

    def __init__(self, submit: Callable[..., Any], parts: int) -> None:
        self._submit, self._parts = submit, parts
        self._sources: list[tuple[Sequence[str], str]] = []
        self._functions: dict[int, Callable[..., Any]] = {}

    def add(self, argument_types: Sequence[str], source: str) -> int:
        """One more kernel; its number."""
        self._sources.append((argument_types, source))
        return len(self._sources) - 1

    def function(self, number: int) -> Callable[..., Any]:
        """The compiled kernel, and so all of them."""
        if number not in self._functions:
            numbers = range(len(self._sources))
            parts = [numbers[i :: self._parts] for i in range(self._parts)]
            waiting = [(part, self._start(part)) for part in parts if part]
            for part, made in waiting:
                self._functions.update(zip(part, made()(), strict=True))
        return self._functions[number]

    def _start(self, numbers: Sequence[int]) -> Callable[..., Any]:
        """Begins to compile some; what waits for the function that returns them."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        text, bindings = "", ""
        for number in numbers:
            types, source = self._sources[number]
            text += f"#define kernel kernel_{number}\n{source}\n#undef kernel\n"
            arguments = ", ".join(
                f"parse_arg<{kind.replace('const ', '')}>(args, {i})"
                for i, kind in enumerate(types)
            )
            bindings += _BINDING.format(number=number, count=len(types), arguments=arguments)
        made = ", ".join(f"PyCFunction_New(&method_{number}, nullptr)" for number in numbers)

        class Kernels(CppPythonBindingsCodeCache):
            cache: dict[str, Any] = {}  # noqa: RUF012
            entry_function = "kernels"
            call_entry_function = f'return Py_BuildValue("({"N" * len(numbers)})", {made});'
            extra_parse_arg = bindings

        start = Kernels.load_pybinding_async
        return cast(Callable[..., Any], start([], text, submit_fn=self._submit))


@contextmanager
def batched_kernels() -> Iterator[None]:
    """Lets Inductor compile the C++ kernels of a graph together, a part for each of its threads."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import LambdaFuture

    patched: Any = AsyncCompile
    alone = patched.cpp_pybinding

    def compile_batched(self: Any, argument_types: list[str], source: str) -> Any:
        threads = get_compile_threads()
        if threads <= 1 or not _KERNEL.match(source) or source.count('extern "C"') != 1:
            return alone(self, argument_types, source)
        batch = self.__dict__.setdefault("_kvpass_batch", _Batch(self.submit, threads))
        return LambdaFuture(partial(batch.function, batch.add(argument_types, source)))

    patched.cpp_pybinding = compile_batched
    try:
        yield
    finally:
        patched.cpp_pybinding = alone


@contextmanager
def trusted_vectors() -> Iterator[None]:
    """Lets Inductor take the vectors that this CPU has for ones that the compiler has, too, and not
    compile a program with each kind to see: seconds in a process that finds nothing compiled."""
    from torch._inductor import config

    known = config.cpp.vec_isa_ok
    with config.patch({"cpp.vec_isa_ok": True if known is None else known}):
        yield


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
