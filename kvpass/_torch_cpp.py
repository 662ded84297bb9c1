"""Compiling C++ as Inductor does, through its private APIs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._ops import OpOverload

from kvpass._torch_calls import CompiledModule, empty_strided_cpu
from kvpass._torch_libraries import keep, keeping, kept, library_key


@cache
def _code_cache() -> Any:
    from torch._inductor.codecache import CppCodeCache

    return keeping(CppCodeCache)


@cache
def _bindings_cache() -> Any:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return keeping(CppPythonBindingsCodeCache)


def start_cpp(source: str, flags: Sequence[str]) -> Callable[[], Any]:
    """Begins to compile C++ ``source`` with Inductor's compiler, in one of its threads (where it
    has but one, on waiting), unless it is kept; ``flags`` come behind Inductor's own, so that they
    win.

    Returns:
        What waits for the library.
    """
    with trusted_vectors():
        made: Callable[[], Any] = _code_cache().load_async(
            source, extra_flags=tuple(flags), submit_fn=_submit() and _submit_behind_header
        )
    return made


def _submit_behind_header(task: Callable[[], Any]) -> Any:
    """What is called if something is compiled: then the graph around it will be, too."""
    from torch._inductor.async_compile import AsyncCompile

    start_header()
    return AsyncCompile.submit(task)


@cache
def start_header() -> None:
    """Begins to precompile the header that Inductor's own kernels include, unless this machine has
    it: the five seconds that it takes pass while the graph is lowered."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # A source of no kernel, which nobody compiles: Inductor sees to its header first.
    start: Any = CppPythonBindingsCodeCache.load_async
    begin = partial(start, "", submit_fn=lambda task: Future[None]())
    # Inductor's options, of which its flags are some, belong to the context.
    AsyncCompile.submit(partial(copy_context().run, begin))


def _submit() -> Callable[..., Any] | None:
    """What has one of Inductor's threads compile. With one thread it would compile at once, under a
    lock that compiling takes again."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    return AsyncCompile.submit if get_compile_threads() > 1 else None


def load_cpp(source: str, flags: Sequence[str]) -> Any:
    """The library of `start_cpp`."""
    return start_cpp(source, flags)()


def empty_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An unwritten contiguous tensor, made as Inductor's code makes its own: in half the time."""
    strides: tuple[int, ...] = (1,)
    for size in reversed(shape[1:]):
        strides = (strides[0] * size, *strides)
    return empty_strided_cpu(shape, strides, dtype)


@cache
def multiplies_bfloat16() -> bool:
    """Whether compiled C++ has instructions that multiply vectors of bfloat16."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability == "AVX512" and torch.cpu._is_avx512_bf16_supported()


@cache
def multiplies_tiles() -> bool:
    """Whether this process may use the CPU's tiles (AMX), which Linux grants to those that ask."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


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


# Modules of generated code, by the `id` of their scopes, which they hold.
_modules: dict[int, CompiledModule] = {}
# All that a kernel's source has but one function `kernel`: what else there is could meet its like.
_KERNEL = re.compile(r'\s*#include <[^>]+>\s*extern "C"\s+void\s+kernel\(')
# As `CppPythonBindingsCodeCache` binds one function.
_BINDING = """
static PyObject* call_kernel_{number}(PyObject*, {parameters}) {{{{
  try {{{{
    if ({given} != {count}) throw std::runtime_error("requires {count} args");
    kernel_{number}({arguments});
    Py_RETURN_NONE;
  }}}} catch (std::exception const& error) {{{{
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }}}}
}}}}
static PyMethodDef method_{number} = {{{{
  "kernel_{number}", (PyCFunction)(void (*)())call_kernel_{number}, {flag}, ""
}}}};
"""
# How its functions get their arguments, up to torch 2.14 and from then on.
_TUPLE = {"parameters": "PyObject* args", "given": "PyTuple_GET_SIZE(args)", "flag": "METH_VARARGS"}
_ARRAY = {
    "parameters": "PyObject* const* args, Py_ssize_t given",
    "given": "given",
    "flag": "METH_FASTCALL",
}


def _convention() -> dict[str, str]:
    return _ARRAY if _ARRAY["flag"] in _bindings_cache().suffix_template else _TUPLE


class _Batch:
    """Kernels that are compiled together: a compiler's start, and reading its headers, take most of
    the time of each."""

    def __init__(self) -> None:
        self._sources: list[tuple[Sequence[str], str]] = []
        self._functions: dict[int, tuple[Callable[..., Any], int]] = {}

    def add(self, argument_types: Sequence[str], source: str) -> int:
        """One more kernel; its number."""
        self._sources.append((argument_types, source))
        return len(self._sources) - 1

    def function(self, number: int) -> tuple[Callable[..., Any], int]:
        """The compiled kernel, and the address of what it calls; all are compiled then."""
        if number not in self._functions:
            numbers, count = range(len(self._sources)), self._parts()
            parts = [numbers[i::count] for i in range(count)]
            waiting = [(part, self._start(part)) for part in parts if part]
            for part, made in waiting:
                functions, addresses = made()()
                found = zip(functions, addresses, strict=True)
                self._functions.update(zip(part, found, strict=True))
        return self._functions[number]

    def _parts(self) -> int:
        """A part for each thread, of the process that compiled these kernels first: it is found in
        any number of threads."""
        from torch._inductor.async_compile import get_compile_threads

        key = library_key("parts", repr(self._sources), ())
        if (path := kept(key)) is not None:
            return int(path.read_text())
        count = get_compile_threads()
        keep(key, str(count).encode(), ".txt")
        return count

    def _start(self, numbers: Sequence[int]) -> Callable[..., Any]:
        """Begins to compile some; what waits for the function that returns them and their
        addresses."""
        text, bindings = "", ""
        for number in numbers:
            types, source = self._sources[number]
            text += f"#define kernel kernel_{number}\n{source}\n#undef kernel\n"
            arguments = ", ".join(
                f"parse_arg<{kind.replace('const ', '')}>(args, {i})"
                for i, kind in enumerate(types)
            )
            bindings += _BINDING.format(
                number=number, count=len(types), arguments=arguments, **_convention()
            )
        made = [f"PyCFunction_New(&method_{number}, nullptr)" for number in numbers]
        made += [f"PyLong_FromVoidPtr((void*)kernel_{number})" for number in numbers]
        all_of_them = "N" * len(numbers)

        class Kernels(_bindings_cache()):  # type: ignore[misc]
            entry_function = "kernels"
            call_entry_function = (
                f'return Py_BuildValue("(({all_of_them})({all_of_them}))", {", ".join(made)});'
            )
            extra_parse_arg = bindings

        start = Kernels.load_pybinding_async
        return cast(Callable[..., Any], start([], text, submit_fn=_submit()))


@dataclass(frozen=True, eq=False)
class _Kernel:
    """What stands in compiled modules for a kernel of a batch, until that is compiled."""

    batch: _Batch
    number: int

    def __call__(self, *args: Any) -> None:
        # Of a module whose compilation has failed before its end.
        self.batch.function(self.number)[0](*args)


@contextmanager
def batched_kernels() -> Iterator[list[CompiledModule]]:
    """Lets Inductor compile the C++ kernels of graphs together, a part for each of its threads, and
    keep them. The graphs can be called when the context is left; gives the modules of their code,
    complete then."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import LambdaFuture, PyCodeCache

    patched: Any = AsyncCompile
    compiles, waits, load = patched.cpp_pybinding, patched.wait, PyCodeCache.load_by_key_path
    batch, new, loaded = _Batch(), list[CompiledModule](), list[CompiledModule]()

    def compile_batched(self: Any, argument_types: list[str], source: str) -> Any:
        if not _KERNEL.match(source) or source.count('extern "C"') != 1:
            start = _bindings_cache().load_pybinding_async
            return LambdaFuture(start(argument_types, source, submit_fn=_submit()))
        return _Kernel(batch, batch.add(argument_types, source))

    def wait_for_others(self: Any, scope: dict[str, Any]) -> None:
        module = CompiledModule(scope, any(isinstance(x, LambdaFuture) for x in scope.values()))
        # Inductor expects none of a single thread.
        if get_compile_threads() <= 1:
            self._wait_futures(scope)
        waits(self, scope)
        _modules[id(scope)] = module
        new.append(module)

    def load_and_note(*args: Any, **options: Any) -> Any:
        # One that this process has loaded before is not executed again.
        module = load(*args, **options)
        scope = vars(module)
        loaded.append(_modules.get(id(scope)) or CompiledModule(scope, foreign=True))
        return module

    patched.cpp_pybinding, patched.wait = compile_batched, wait_for_others
    try:
        with patch.object(PyCodeCache, "load_by_key_path", load_and_note):
            yield loaded
    finally:
        patched.cpp_pybinding, patched.wait = compiles, waits
    for module in new:
        for name, kernel in list(module.scope.items()):
            if isinstance(kernel, _Kernel):
                function, address = kernel.batch.function(kernel.number)
                module.scope[name], module.addresses[name] = function, address


@contextmanager
def trusted_vectors() -> Iterator[None]:
    """Lets Inductor take the vectors that this CPU has for ones that the compiler has, too, and not
    compile a program with each kind to see: seconds in a process that finds nothing compiled."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecAMX, VecISA

    known, check_build = config.cpp.vec_isa_ok, VecISA.check_build

    def builds(vectors: VecISA, code: str) -> bool:
        # Compilers in use lack some of AMX.
        return not isinstance(vectors, VecAMX) or check_build(vectors, code)

    trusted = config.patch({"cpp.vec_isa_ok": True if known is None else known})
    # bfloat16's and VNNI's are asked for behind that option.
    with trusted, patch.object(VecISA, "check_build", builds):
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
