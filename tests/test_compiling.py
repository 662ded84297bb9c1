"""What is compiled: libraries that are not whole anew, kernels together, and nothing twice, nor in
another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError
from torch.compiler._cache import CacheArtifactManager

from kvpass import _torch_cpp, _torch_libraries
from kvpass._torch_cpp import batched_kernels, load_cpp
from kvpass._torch_libraries import cpu_features, is_cut_off, library_key, path_of
from lowering.cpp import library
from tests.start_worker import start

SOURCE = 'extern "C" int kvpass_answer() { return 42; }\n'


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty caches, and no artifacts but what a test makes."""
    forgotten = (
        library._started.cache_clear, library.load_function.cache_clear,
        _torch_cpp._code_cache().cache.clear, _torch_cpp._bindings_cache().cache.clear,
    )  # fmt: skip
    for forget in forgotten:
        forget()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with CacheArtifactManager.with_fresh_cache():
        yield


def kept_file(source: str = SOURCE) -> Path:
    """The one that is kept of a library."""
    with _torch_cpp.trusted_vectors():
        key = library_key("CppCodeCache", source, ())
    (path,) = (_torch_libraries._folder() / key).iterdir()
    return path


def damage(path: Path, content: bytes) -> None:
    """Another file at its place: the one that is loaded must stay as it is."""
    path.with_suffix(".damaged").write_bytes(content)
    os.replace(path.with_suffix(".damaged"), path)


@pytest.mark.parametrize("kept", [0, 3, 64, 0.5, 0.999])
@pytest.mark.usefixtures("artifacts")
def test_a_library_that_is_cut_off_is_compiled_anew(kept: float) -> None:
    made = Path(path_of(load_cpp(SOURCE, ())))
    whole = made.read_bytes()
    assert not is_cut_off(str(made))
    _torch_cpp._code_cache().cache.clear()
    for path in (made, kept_file()):
        damage(path, whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert is_cut_off(str(made))
    again = load_cpp(SOURCE, ())
    assert again.kvpass_answer() == 42
    assert path_of(again) == str(made)
    assert kept_file().read_bytes() == made.read_bytes()
    assert not is_cut_off(str(made))


@pytest.mark.usefixtures("artifacts")
def test_a_damaged_artifact_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong bit is enough: in what was saved, and in what lies there."""
    load_cpp(SOURCE, ())
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    content, info = saved
    (key,) = info.artifacts["kvpass"]
    right = kept_file().read_bytes()
    wrong = bytes([*right[:-9], right[-9] ^ 1, *right[-8:]])
    assert content.count(right) == 1

    def load() -> Path:
        _torch_cpp._code_cache().cache.clear()
        found = load_cpp(SOURCE, ())
        assert found.kvpass_answer() == 42
        return Path(path_of(found))

    # PyTorch refuses the whole of it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    torch.compiler.load_cache_artifacts(content.replace(right, wrong))
    assert not _torch_libraries._folder().exists()
    damaged = _torch_libraries.KeptFile(key, wrong)
    with pytest.warns(UserWarning, match="kvpass: compiled code in the artifacts is damaged"):
        damaged.populate_cache()
    assert not _torch_libraries._folder().exists()
    torch.compiler.load_cache_artifacts(content)
    found = load()
    assert found == kept_file() == _torch_libraries._folder() / key
    damage(found, wrong)
    assert load() != found
    assert kept_file().read_bytes() != wrong


@pytest.mark.parametrize("threads", [1, 2])
def test_a_library_is_compiled_with_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    # A lock that is never had is an error in a second, not in ten minutes.
    monkeypatch.setattr("torch._inductor.codecache.LOCK_TIMEOUT", 1)
    monkeypatch.setattr(_torch_libraries, "cpu_features", lambda: f"never seen: {uuid4()}")
    assert load_cpp(SOURCE, ()).kvpass_answer() == 42


def test_code_is_for_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = library_key("", SOURCE, ())
    assert cpu_features()
    assert library_key("", SOURCE, ("-g0",)) != here
    assert library_key("", SOURCE + " ", ()) != here
    with torch._inductor.config.patch({"cpp.march": "none of this one's"}):
        assert library_key("", SOURCE, ()) != here
    monkeypatch.setattr(_torch_libraries, "cpu_features", lambda: "none of this one's instructions")
    assert library_key("", SOURCE, ()) != here


def test_the_compiler_is_asked_for_amx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU has of it, compilers in use may lack."""
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: False)
    with _torch_cpp.trusted_vectors():
        assert cpu_vec_isa.VecAVX512VNNI().check_build("")
        assert not cpu_vec_isa.VecAMX().check_build("")
    assert not cpu_vec_isa.VecAVX512VNNI().check_build("")


KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0)
{{ for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = {value} * in_ptr0[i]; }}
"""
TYPES = ["const float*", "float*", "const int64_t"]
HELPER = "#include <cstdint>\nstatic float twice(float x) { return x + x; }\n"


def compile_kernel(scope: dict[str, Callable[..., None]], types: list[str] = TYPES) -> None:
    """What a compiled module with one kernel does."""
    compiled = AsyncCompile()
    scope["k"] = compiled.cpp_pybinding(types, KERNEL.format(value=2))
    compiled.wait(scope)


@pytest.mark.usefixtures("artifacts")
def test_kernels_of_a_graph_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many parts as there are threads; one that is more than a function stays alone. A
    process with another number of threads finds them."""
    sources = [KERNEL.format(value=value) for value in (2, 3, 5)]
    sources.append(KERNEL.format(value="twice(3.5f)").replace("#include", HELPER + "#include"))
    x, y = torch.ones(3), torch.zeros(3)
    for threads in (2, 1):
        monkeypatch.setattr(
            "torch._inductor.async_compile.get_compile_threads", lambda n=threads: n
        )
        known = set(CppPythonBindingsCodeCache._loaded_module_names)
        compiled = AsyncCompile()
        with batched_kernels(), _torch_cpp.trusted_vectors():
            scope = {f"k{i}": compiled.cpp_pybinding(TYPES, x) for i, x in enumerate(sources)}
            compiled.wait(scope)
        for name, value in zip(scope, (2, 3, 5, 7), strict=True):
            scope[name](x, y, 3)
            assert y.tolist() == [value] * 3
            with pytest.raises(RuntimeError, match="3 args"):
                scope[name](x, y)
        new = CppPythonBindingsCodeCache._loaded_module_names - known
        names = sorted(name.rpartition(".")[2] for name in new)
        assert names == ["kernel", "kernels", "kernels"]
        # What was built, by the first alone.
        assert len(list(_torch_libraries._folder().parent.glob("*/*.so"))) == 3


@pytest.mark.usefixtures("artifacts")
def test_kernels_of_what_failed_are_compiled_when_called() -> None:
    """Another graph of this process may consist of the same modules."""
    scope: dict[str, Callable[..., None]] = {}

    def fail_after_one_kernel() -> None:
        with batched_kernels():
            compile_kernel(scope)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_one_kernel()
    x, y = torch.ones(3), torch.zeros(3)
    scope["k"](x, y, 3)
    assert y.tolist() == [2.0] * 3


@pytest.mark.usefixtures("artifacts")
def test_the_header_of_kernels_is_begun_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that they ask for, with the same flags, when something is compiled; not before."""
    wanted = []

    def ask(header: str, *flags: str, **options: object) -> str:
        wanted.append((header, flags, options))
        return header

    monkeypatch.setattr("torch._inductor.codecache._precompile_header", ask)
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    submit, futures = AsyncCompile.submit, []

    def remember(task: Callable[[], object]) -> object:
        futures.append(submit(task))
        return futures[-1]

    monkeypatch.setattr(AsyncCompile, "submit", remember)
    # As in a process that has compiled nothing.
    monkeypatch.setattr(CppPythonBindingsCodeCache, "cache", {})
    _torch_cpp.start_header.cache_clear()
    for _ in range(2):
        _torch_cpp._code_cache().cache.clear()
        load_cpp(SOURCE, ())
    for future in futures:
        future.result()
    (begun,) = wanted
    assert begun[0] == "torch/csrc/inductor/cpp_prefix.h"
    with pytest.raises(CppCompileError), batched_kernels():
        compile_kernel({}, types=TYPES[:1])
    assert wanted == [begun, begun]


@pytest.mark.usefixtures("artifacts")
def test_another_process_with_empty_caches_compiles_nothing(tmp_path: Path) -> None:
    """It has the artifacts of this one, and no compiler: Inductor's graphs and kernels are there,
    and kvpass's."""
    logits = start()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    (tmp_path / "artifacts").write_bytes(saved[0])
    empty = {
        name: str(tmp_path / "empty")
        for name in ("TORCHINDUCTOR_CACHE_DIR", "KVPASS_CACHE_DIR", "TMPDIR", "PATH")
    }
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.start_worker", str(tmp_path / "artifacts")],
        env={**os.environ, **empty, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["hit"], found["miss"]) == (2, 0)
    torch.testing.assert_close(found["logits"], logits)
