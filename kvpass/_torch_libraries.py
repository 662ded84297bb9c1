"""Compiled C++ in files of its own, found by what it was made from, without a compiler;
``torch.compiler.save_cache_artifacts`` carries it. Private APIs of Inductor's code cache.

A file is ``<folder>/<key>/<digest>.so``: the key covers the source, the flags, what the CPU can do
and all versions; the digest covers the key and the content. One whose digest is another is gone.
"""

from __future__ import annotations

import hashlib
import platform
import struct
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager

_LIBRARY, _TEXT = ".so", ".txt"
# What Inductor's options give the compiler beside the flags that it is called with.
_OPTIONS = ("cpp.", "aot_inductor.")


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "kvpass"


def _digest(key: str, content: bytes) -> str:
    return hashlib.sha256(key.encode() + content).hexdigest()


def _warn(message: str) -> None:
    warnings.warn(f"kvpass: {message}.", stacklevel=3)


def keep(key: str, content: bytes, suffix: str) -> None:
    """Keeps ``content`` under ``key``; without room for it, it is made again another time."""
    from torch._inductor.codecache import write_atomic

    name = f"{key}/{_digest(key, content)}{suffix}"
    CacheArtifactManager.record_artifact(KeptFile.type(), name, content)
    try:
        write_atomic(str(_folder() / name), content, make_dirs=True)
    except OSError as error:
        _warn(f"compiled code cannot be kept in {_folder()}: {error.strerror}")


def kept(key: str) -> Path | None:
    """The file under ``key``, if it is whole."""
    for path in sorted((_folder() / key).glob("*.*")):
        try:
            content = path.read_bytes()
            if path.stem == _digest(key, content):
                CacheArtifactManager.record_artifact(KeptFile.type(), f"{key}/{path.name}", content)
                return path
            path.unlink(missing_ok=True)
        except OSError as error:
            _warn(f"{path} cannot be read: {error.strerror}")
    return None


@CacheArtifactFactory.register
class KeptFile(CacheArtifact):
    """A file of compiled code in what ``torch.compiler.save_cache_artifacts`` saves."""

    def populate_cache(self) -> None:
        key, _, name = self.key.partition("/")
        suffix = Path(name).suffix
        if suffix in (_LIBRARY, _TEXT) and Path(name).stem == _digest(key, self.content):
            keep(key, self.content, suffix)
        else:
            _warn("compiled code in the artifacts is damaged; it will be compiled anew")

    @staticmethod
    def type() -> str:
        return "kvpass"


@cache
def cpu_features() -> str:
    """What this CPU can do, by the names that the system has for it: code is compiled for that."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith(("flags", "Features"))), "")


def library_key(kind: str, source: str, flags: Sequence[str]) -> str:
    """What a compiled source is kept under."""
    from torch._inductor import config

    options = {k: v for k, v in config.save_config_portable().items() if k.startswith(_OPTIONS)}
    versions = torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX")
    cpu = cpu_features(), torch.backends.cpu.get_cpu_capability()
    made_from = kind, versions, cpu, sorted(options.items()), flags, source
    return hashlib.sha256(repr(made_from).encode()).hexdigest()


class _DamagedLibraryError(Exception):
    """A compiled library was not whole, and is gone."""


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


def keeping(code_cache: Any) -> Any:
    """A class of Inductor's for compiled C++ whose libraries are kept. It trusts none that is not
    whole: what a process that was killed, or a full disk, left in Inductor's cache."""

    class Keeping(code_cache):
        cache: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def load_async(
            cls,
            main_code: str,
            *args: Any,
            submit_fn: Callable[..., Any] | None = None,
            extra_flags: Sequence[str] = (),
            **options: Any,
        ) -> Callable[[], Any]:
            key = library_key(code_cache.__name__, main_code, tuple(extra_flags))
            if (path := kept(key)) is not None:
                library = super()._load_library(str(path), key)
                return lambda: library
            # Inductor's own cache does not know what the CPU can do.
            text = f"{main_code}\n// The CPU has {cpu_features()}.\n"
            made = super().load_async(
                text, *args, submit_fn=submit_fn, extra_flags=extra_flags, **options
            )

            def wait() -> Any:
                try:
                    library = made()
                except _DamagedLibraryError:
                    library = made()
                keep(key, Path(path_of(library)).read_bytes(), _LIBRARY)
                return library

            return wait

        @classmethod
        def _load_library(cls, path: str, key: str) -> Any:
            if is_cut_off(path):
                Path(path).unlink(missing_ok=True)
                raise _DamagedLibraryError
            return super()._load_library(path, key)

    return Keeping


def path_of(library: Any) -> str:
    """The file of a loaded library, a module or one of `ctypes`."""
    path: str = getattr(library, "__file__", None) or library._name
    return path
