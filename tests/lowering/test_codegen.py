"""Generated files: named after their content, written atomically, with clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from itertools import product

import pytest

from kvpass.errors import KernelError
from lowering import codegen
from lowering.triton.layouts import layout_of
from triton_templates import render, template_names

LAYOUT = layout_of("int4.channel32/window=0,pack_every=128", 64)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path))
    codegen.load_kernels.cache_clear()
    yield
    codegen.load_kernels.cache_clear()


def test_loads_and_remembers(tmp_path):
    parameters = {"layout": LAYOUT, "rope": None, "basis": None}
    parameters |= {"clip_each": False, "new_varies": False}
    module = codegen.load_kernels("append", **parameters)
    assert module.append_step.__name__ == "append_step"
    (path,) = tmp_path.iterdir()
    assert codegen.generated_files()[path] == "append"
    assert path.read_text() == render("append", **parameters)
    assert codegen.load_kernels("append", **parameters) is module


def test_the_name_follows_the_content(tmp_path):
    first = codegen.write_source("pack", "a = 1\n")
    assert codegen.write_source("pack", "a = 1\n") == first
    assert codegen.write_source("pack", "a = 2\n") != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    codegen._temporary_folder.cache_clear()
    message = (
        r"kvpass::pack can be written neither to the cache folder \(No space left on device\) nor "
        r"to a temporary one \(No space left on device\); set KVPASS_CACHE_DIR to a folder"
    )
    with pytest.raises(KernelError, match=message), pytest.warns(match="cannot be written"):
        codegen.write_source("pack", "a = 1\n")
    assert not list(tmp_path.iterdir())


def test_without_a_cache_folder_kernels_are_kept_for_the_process(tmp_path, monkeypatch):
    """A home that can only be read, say."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path / "file"))
    codegen._temporary_folder.cache_clear()
    with pytest.warns(match=r"the cache folder cannot be written \(.*\): generated kernels are"):
        first = codegen.write_source("pack", "a = 1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = codegen.write_source("pack", "a = 2\n")
    assert first.read_text() == "a = 1\n"
    assert second.parent == first.parent
    assert tmp_path not in first.parents
    assert codegen.import_source("pack", second).a == 2


def test_template_errors_name_the_op():
    with pytest.raises(
        KernelError, match=r"kvpass::pack cannot be rendered .*'layout' is undefined"
    ):
        codegen.load_kernels("pack")


def test_import_errors_name_the_file():
    path = codegen.write_source("pack", "import no_such_module\n")
    with pytest.raises(KernelError, match=rf"kvpass::pack in {path} cannot be imported: No module"):
        codegen.import_source("pack", path)


@pytest.mark.parametrize("template", template_names())
def test_generated_files_pass_the_linter(template, tmp_path):
    layouts = (
        layout_of("fp", 128),
        LAYOUT,
        layout_of("int2.token32/window=128,pack_every=1", 64),
        layout_of("int8.token24/window=4,pack_every=1", 96),
        layout_of("int2.token32/window=24,pack_every=1", 96),
    )
    # Keys are rotated by their positions, or brought to another basis.
    for layout, rope in product(layouts, ((0, 16, True), None)):
        values = layouts[-1] if layout.by_channel else layouts[2]
        basis = None if rope else layout.head_dim
        parameters = {
            "layout": layout, "rope": rope, "basis": basis, "clip_each": False, "k": layout,
            "v": values, "k_rope": rope and (0, 16, False), "k_basis": basis, "k_clip_each": False,
            "v_clip_each": True,
            "tile": 32, "part": 16, "edge_tile": 32, "advances": layout.by_channel,
            "new_varies": layout.identity,
        }  # fmt: skip
        codegen.write_source(template, render(template, **parameters))
    command = (sys.executable, "-m", "ruff", "check", "--isolated", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
