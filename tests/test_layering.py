"""The law of imports, read from the syntax trees."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvpass", "lowering", "triton_templates")
FILES = {
    str(p.relative_to(ROOT)): p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))
}


def guarded(node: ast.AST) -> bool:
    test = getattr(node, "test", None)
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return isinstance(node, ast.If) and name == "TYPE_CHECKING"


def imported(tree: ast.AST, types: bool = True) -> Iterator[str]:
    """Dotted names that a file imports; ``types``: also those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif guarded(node) and not types:
            yield from imported(ast.Module(node.orelse, []), types)
        else:
            yield from imported(node, types)


def imports_of(package: str, **options: bool) -> dict[str, set[str]]:
    return {
        name: set(imported(ast.parse(path.read_text()), **options))
        for name, path in FILES.items()
        if name.split("/")[0] == package
    }


def top(name: str) -> str:
    return name.split(".")[0]


def test_reader_of_imports():
    source = """
import a.b
from c import d
if TYPE_CHECKING:
    import e
else:
    import f
def g():
    from h.i import j
"""
    assert set(imported(ast.parse(source))) == {"a.b", "c.d", "e", "f", "h.i.j"}
    assert set(imported(ast.parse(source), types=False)) == {"a.b", "c.d", "f", "h.i.j"}
    assert len(FILES) > 20


def test_templates_import_no_sibling():
    found = imports_of("triton_templates")
    assert [
        f for f, names in found.items() if {top(n) for n in names} & {"kvpass", "lowering"}
    ] == []


def test_lowering_imports_the_meaning_of_ops_only():
    allowed = (
        "kvpass.ops.",
        "kvpass.format.",
        "kvpass.errors.",
        "kvpass._torch.",
        "kvpass._torch_calls.",
        "kvpass._torch_cpp.",
        "kvpass._torch_sizes.",
    )
    strange = {
        (file, name)
        for file, names in imports_of("lowering").items()
        for name in names
        if top(name) == "kvpass" and not f"{name}.".startswith(allowed)
    }
    assert strange == set()


def test_two_files_of_kvpass_import_lowering():
    found = imports_of("kvpass", types=False)
    users = [file for file, names in found.items() if "lowering" in {top(n) for n in names}]
    assert users == ["kvpass/cli/kernels.py", "kvpass/inner.py"]


def test_nothing_that_runs_models_imports_benchmarks():
    found = imports_of("kvpass")
    users = {f for f, names in found.items() if any(n.startswith("kvpass.bench.") for n in names)}
    users = {file for file in users if not file.startswith(("kvpass/bench/", "kvpass/cli/"))}
    # Its random models are made as those that are timed.
    assert users == {"kvpass/zoo/families.py"}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def module_graph() -> dict[str, set[str]]:
    """The modules that each module imports, wherever and for whatever purpose it does."""
    modules = {module_of(path) for path in FILES}
    graph = {}
    for path, file in FILES.items():
        found = set()
        for name in imported(ast.parse(file.read_text())):
            # A module, or a name in one.
            found |= {name if name in modules else name.rpartition(".")[0]} & modules
        graph[module_of(path)] = found - {module_of(path)}
    return graph


def test_no_module_imports_itself_through_others():
    try:
        TopologicalSorter(module_graph()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' -> '.join(error.args[1])}") from None


# What is used of PyTorch, and of Inductor for a GPU that is not there.
PRIVATE = tuple(
    f"kvpass/_torch{x}.py"
    for x in ("", "_calls", "_cpp", "_gpu", "_inductor", "_libraries", "_sizes")
)


def private(name: str) -> bool:
    return top(name) == "torch" and any(part.startswith("_") for part in name.split(".")[1:])


@pytest.mark.parametrize("package", PACKAGES)
def test_private_torch_is_imported_in_few_files(package):
    users = {
        (file, name)
        for file, names in imports_of(package).items()
        for name in names
        if private(name) and file not in PRIVATE
    }
    assert users == set()


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """``torch._x``, ``torch.utils._x`` ... written out in code."""
    for node in ast.walk(tree):
        names, inner = [], node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id == "torch":
            dotted = ".".join(["torch", *reversed(names)])
            if private(dotted):
                yield dotted


def test_private_torch_is_read_in_two_files():
    users = {
        (file, name)
        for file, path in FILES.items()
        if file not in PRIVATE
        for name in private_attributes(ast.parse(path.read_text()))
    }
    assert users == set()


@pytest.mark.parametrize("package", ["kvpass", "kvpass.cli", "triton_templates"])
def test_importing_the_package_does_not_import_torch(package):
    code = f"import sys, {package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_the_backend_prints_nothing():
    """Nor does it import what transformers can quantize models with; commands hide its warnings."""
    code = (
        "import sys, kvpass, kvpass.backend\n"
        "assert 'torchao' not in sys.modules\n"
        "from kvpass.cli.models import quiet_torchao\n"
        "with quiet_torchao():\n"
        "    import transformers.modeling_utils\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_public_names_exist():
    code = (
        "import kvpass\n"
        "for name in kvpass.__all__:\n"
        "    assert getattr(kvpass, name) is not None, name\n"
        "try:\n"
        "    kvpass.nothing\n"
        "except AttributeError as error:\n"
        "    assert str(error) == \"module 'kvpass' has no attribute 'nothing'\"\n"
        "else:\n"
        "    raise SystemExit(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
