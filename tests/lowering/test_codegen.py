"""Generated files: named after their content, written atomically, with clear errors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvpass.errors import KernelError
from lowering import codegen
from triton_templates import Layout, render, template_names

LAYOUT = Layout(64, 4, "channel", 32, 143)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path))
    codegen.load_kernels.cache_clear()
    yield
    codegen.load_kernels.cache_clear()


def test_loads_and_remembers(tmp_path):
    module = codegen.load_kernels("append", layout=LAYOUT)
    assert module.append_step.__name__ == "append_step"
    (path,) = tmp_path.iterdir()
    assert codegen.generated_files()[path] == "append"
    assert path.read_text() == render("append", layout=LAYOUT)
    assert codegen.load_kernels("append", layout=LAYOUT) is module


def test_the_name_follows_the_content(tmp_path):
    first = codegen.write_source("pack", "a = 1\n")
    assert codegen.write_source("pack", "a = 1\n") == first
    assert codegen.write_source("pack", "a = 2\n") != first
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KernelError, match=r"kvpass::pack cannot be written to .*No space left"):
        codegen.write_source("pack", "a = 1\n")
    assert not list(tmp_path.iterdir())


def test_unwritable_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(KernelError, match="set KVPASS_CACHE_DIR to a folder that can be written"):
        codegen.write_source("pack", "a = 1\n")


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
        Layout(128),
        LAYOUT,
        Layout(64, 2, "token", 32, 144),
        Layout(96, 8, "token", 24, 20),
        Layout(96, 2, "token", 32, 40),
    )
    for layout in layouts:
        parameters = {"layout": layout}
        if template == "attention":
            parameters = {
                "k": layout,
                "v": layouts[-1] if layout.by_channel else layouts[2],
                "tile": 32,
                "part": 16,
                "edge_tile": 32,
            }
        codegen.write_source(template, render(template, **parameters))
    command = (sys.executable, "-m", "ruff", "check", "--isolated", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
