"""Generated kernels as files: rendered, named after their content, written once, imported.

A file is ``<cache folder>/<template>_<hash of the text>.py``, so that another version of a
template, or other parameters, never meet a stale file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
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
    """What names a file by its content."""
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


@cache
def sources_digest() -> str:
    """Of the code that makes kernels and launches them."""
    folders = (Path(__file__).parent, TEMPLATES)
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".jinja"))
    return digest("".join(file.read_text(encoding="utf-8") for file in files))


def write_source(template: str, text: str, suffix: str = ".py") -> Path:
    """Writes ``text`` to the file that its content names, unless it is there already.

    Raises:
        KernelError: if the cache folder cannot be written.
    """
    path = cache_folder() / f"{template}_{digest(text)}{suffix}"
    try:
        if not path.exists():
            write_atomically(path, text)
    except OSError as error:
        raise KernelError(
            f"The kernel of kvpass::{template} cannot be written to {path}: {error.strerror}; "
            f"set {CACHE_VARIABLE} to a folder that can be written."
        ) from error
    _generated[path] = template
    return path


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
