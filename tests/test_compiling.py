"""What is compiled: libraries that are not whole anew, kernels together, and nothing twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder

from kvpass import _torch_cpp
from kvpass._torch_cpp import batched_kernels, cpu_features, is_cut_off, load_cpp
from lowering.cpp import library
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model

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


@pytest.mark.parametrize("threads", [1, 2])
def test_a_library_is_compiled_with_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    # A lock that is never had is an error in a second, not in ten minutes.
    monkeypatch.setattr("torch._inductor.codecache.LOCK_TIMEOUT", 1)
    monkeypatch.setattr(_torch_cpp, "cpu_features", lambda: f"never seen: {uuid4()}")
    assert load_cpp(SOURCE, ()).kvpass_answer() == 42


def test_code_is_for_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = path_of(load_cpp(SOURCE, ()))
    assert cpu_features()
    monkeypatch.setattr(_torch_cpp, "cpu_features", lambda: "none of this one's instructions")
    assert path_of(load_cpp(SOURCE, ())) != here


KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{ for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = {value} * in_ptr0[i]; }}
"""
HELPER = "#include <cstdint>\nstatic float twice(float x) { return x + x; }\n"


def test_kernels_of_a_graph_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many parts as there are threads; one that is more than a function stays alone."""
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    sources = [KERNEL.format(value=value) for value in (2, 3, 5)]
    sources.append(KERNEL.format(value="twice(3.5f)").replace("#include", HELPER + "#include"))
    types = ["const float*", "float*", "const int64_t"]
    compiled, known = AsyncCompile(), set(CppPythonBindingsCodeCache._loaded_module_names)
    with batched_kernels():
        scope = {f"k{i}": compiled.cpp_pybinding(types, x) for i, x in enumerate(sources)}
        compiled.wait(scope)
    x, y = torch.ones(3), torch.zeros(3)
    for name, value in zip(scope, (2, 3, 5, 7), strict=True):
        scope[name](x, y, 3)
        assert y.tolist() == [value] * 3
        with pytest.raises(RuntimeError, match="3 args"):
            scope[name](x, y)
    libraries = CppPythonBindingsCodeCache._loaded_module_names - known
    assert sorted(name.rpartition(".")[2] for name in libraries) == ["kernel", "kernels", "kernels"]


def test_another_process_finds_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs in Inductor's cache, under kvpass's tag, and all kernels without the compiler."""
    model = tiny_model("llama", layers=1)

    def start() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        for cached in (library._started, library.load_function):
            cached.cache_clear()
        _torch_cpp._code_cache().cache.clear()
        CppPythonBindingsCodeCache.cache_clear()
        run_steps(compiled(model, "kivi-4bit", "inductor"), prompt(1, 21), [20, 1])
        found = counters["inductor"]
        return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]

    def build(*_: Any) -> None:
        pytest.fail("the compiler was asked")

    start()
    monkeypatch.setattr(CppBuilder, "build", build)
    assert start() == (2, 0)
