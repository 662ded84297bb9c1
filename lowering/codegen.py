"""Generated kernels as files: rendered, named after their content, written once, imported.

A file is ``<cache folder>/<template>_<hash of the text>.py``, so that another version of a
template, or other parameters, never meet a stale file.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from kvpass.errors import KernelError
from triton_templates import render
from triton_templates.renderer import FOLDER as TEMPLATES

CACHE_VARIABLE = "KVPASS_CACHE_DIR"
_HASH_DIGITS = 16
_generated: dict[Path, str] = {}


def cache_folder() -> Path:
    """Where kernels are kept: ``$KVPASS_CACHE_DIR``, or ``kvpass`` in the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpass"


def generated_files() -> dict[Path, str]:
    """The files of the kernels that this process has loaded, and the op of each."""
    return dict(_generated)


@cache
def load_kernels(template: str, **parameters: Any) -> ModuleType:
    """The module that ``template`` renders to; rendered and imported once a process.

    Args:
        template: name of a template, equal to the op's.
        parameters: the template's variables; hashable.

    Raises:
        KernelError: if the template cannot be rendered, or its module be written or imported.
    """
    try:
        text = render(template, **parameters)
    except jinja2.TemplateError as error:
        raise KernelError(
            f"The kernel of kvpass::{template} cannot be rendered from {template}.py.jinja: "
            f"{error}."
        ) from error
    path = write_source(template, text)
    return import_source(template, path)


def digest(text: str) -> str:
    """The part of a file's name that its content gives."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


@cache
def sources_digest() -> str:
    """The digest of the code that makes kernels and launches them."""
    folders, suffixes = (Path(__file__).parent, TEMPLATES), (".py", ".jinja", ".h")
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix in suffixes)
    return digest("".join(file.read_text(encoding="utf-8") for file in files))


def write_source(template: str, text: str, suffix: str = ".py") -> Path:
    """Writes ``text`` to the file that its content names, unless it is there already; where the
    cache folder cannot be written, to a folder that goes with the process, with one warning.

    Raises:
        KernelError: if neither can be written.
    """
    name = f"{template}_{digest(text)}{suffix}"
    try:
        path = _written(cache_folder() / name, text)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        try:
            path = _written(_temporary_folder(reason) / name, text)
        except OSError as second:
            raise KernelError(
                f"The kernel of kvpass::{template} can be written neither to the cache folder "
                f"({reason}) nor to a temporary one ({second.strerror}); set {CACHE_VARIABLE} to "
                "a folder that can be written."
            ) from second
    _generated[path] = template
    return path


def _written(path: Path, text: str) -> Path:
    if not path.exists():
        write_atomically(path, text)
    return path


@cache
def _temporary_folder(reason: str) -> Path:
    """A folder in place of the cache folder, which cannot be used for that reason."""
    folder = tempfile.mkdtemp(prefix="kvpass_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    warnings.warn(
        f"kvpass: the cache folder cannot be written ({reason}): generated kernels are kept for "
        f"this process only. Set {CACHE_VARIABLE} to a folder that can be written.",
        stacklevel=2,
    )
    return Path(folder)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file, and its folder where that is missing.

    Another process sees the whole file or none, since a rename within a folder is atomic.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def import_source(template: str, path: Path) -> ModuleType:
    """Imports the file, under a name that pickling and tracebacks can find.

    Raises:
        KernelError: if it is not valid Python, or Triton refuses it.
    """
    name = f"kvpass_generated_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise KernelError(
            f"The kernel of kvpass::{template} in {path} cannot be imported: {error}."
        ) from error
    return module
