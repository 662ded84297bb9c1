"""Texts: short, with links that lead somewhere; docstrings; and what code must not ask."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "CONTRIBUTING.md", "examples/RESULTS.md", "tests/ZOO.md")
PRODUCT = [
    path
    for name in ("kvpass", "lowering", "triton_templates")
    for path in (ROOT / name).rglob("*.py")
]
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]+)?\)")


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for path, anchor in LINK.findall((ROOT / name).read_text()):
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text()), path + anchor


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    named = re.findall(r"`((?:kvpass|lowering|triton_templates|tests|examples)/[\w./]+)`",
                       (ROOT / name).read_text())  # fmt: skip
    missing = [path for path in named if "NAME" not in path and not (ROOT / path).exists()]
    assert missing == []


def test_templates_are_short():
    long = {
        path.name: count
        for path in (ROOT / "triton_templates").glob("*.jinja")
        if (count := len(path.read_text().splitlines())) > 200
    }
    assert long == {}


def docstrings(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (text := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), text


def test_docstrings_begin_with_a_noun_or_a_verb():
    first = re.compile(r"(Of|That|Which|Those)\b|Raises:")
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in PRODUCT
        for name, text in docstrings(path)
        if first.match(text)
    }
    assert found == set()


# Methods by their recipes' names: what they need of the others is in plans.
METHODS = re.compile(r"\b(kivi|skvq|kvquant|kvmix|cocktail)\b", re.I)


def test_no_code_asks_for_a_recipe():
    """Branches on a recipe's or a method's name are in the recipe's own file."""
    found = set()
    for path in PRODUCT:
        if "recipes" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            tests = [getattr(node, "test", None)] if isinstance(node, ast.If | ast.IfExp) else []
            tests += [n for n in [node] if isinstance(node, ast.Compare)]
            if any(METHODS.search(ast.unparse(test)) for test in tests if test is not None):
                found.add(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == set()
