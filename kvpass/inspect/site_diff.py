"""The part of a graph around one layer's cache, before and after the rules, line by line."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import groupby, starmap, zip_longest
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.graph import magic_methods

from kvpass.format.dtypes import dtype_name
from kvpass.graph.analysis.sites import module_path
from kvpass.graph.spellings import op_name
from kvpass.inspect.report import GraphReport
from kvpass.rules import Event

# Unchanged lines that are shown around others.
_CONTEXT = 2
# As `Miss` names the node where a pattern failed.
_CULPRIT = re.compile(r"\(at (\w+)\)")
# What is said of a line is the first of these that holds.
_MARKS = ("refused", "written", "matched", "left")
_SYMBOL = re.compile(r"\b[su]\d+\b")


@dataclass(frozen=True)
class Line:
    """One node as a line of code.

    Attributes:
        name: of the node.
        code: the call.
        value: dtype and shape of the result.
        path: of the module that it was traced in.
        generic: code and value with numbers for names, the same in layers that are alike.
        rules: which matched, wrote or refused it.
        mark: ``matched``, ``written``, ``refused``, ``left`` (refused, which only costs time), or
            nothing.
    """

    name: str
    code: str
    value: str
    path: str
    generic: str
    rules: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True)
class Row:
    """A line before and the line after that stands beside it."""

    before: Line | None
    after: Line | None

    @property
    def same(self) -> bool:
        """Whether nothing was done to it."""
        left, right = self.before, self.after
        marked = any(line is not None and line.mark for line in (left, right))
        return not marked and left is not None and right is not None and left.code == right.code


@dataclass(frozen=True)
class SiteDiff:
    """What was done at one site, or alike at several ones.

    Attributes:
        paths: of the layers.
        events: of the first one.
        rows: of the first one, in runs to be shown, and to be folded.
    """

    paths: tuple[str, ...]
    events: tuple[Event, ...]
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def runs(self) -> list[tuple[bool, list[Row]]]:
        """The rows in runs; whether each is folded: unchanged, and not beside a change."""
        changed = [i for i, row in enumerate(self.rows) if not row.same]
        near = {i + d for i in changed for d in range(-_CONTEXT, _CONTEXT + 1)}
        folded = groupby(enumerate(self.rows), key=lambda item: item[0] not in near)
        return [(fold, [row for _, row in run]) for fold, run in folded]


def site_diffs(report: GraphReport, layers: Sequence[str]) -> list[SiteDiff]:
    """The diffs of all sites of a graph that rules fired at or refused; those that differ in names
    alone are one.

    Args:
        report: of the graph.
        layers: the paths of the layers that keep a cache; events in their modules are theirs.
    """
    events: dict[str, list[Event]] = {}
    for event in report.events:
        inside = (x for x in layers if event.path == x or event.path.startswith(f"{x}."))
        events.setdefault(next(inside, event.path), []).append(event)
    stages = [_Stage(report.before.graph), _Stage(report.after.graph)]
    alike: dict[object, SiteDiff] = {}
    for path, own in events.items():
        before, after = (stage.lines(path, own, path in layers) for stage in stages)
        rows = tuple(_aligned(before, after))
        generic = [[x and (x.generic, x.rules) for x in (r.before, r.after)] for r in rows]
        numbers = {x.name: str(i) for lines in (before, after) for i, x in enumerate(lines)}
        done = [(e.rule, e.fired, _generic(e.detail, numbers)) for e in own]
        key = str((re.sub(r"\d+", "*", path), generic, done))
        known = alike.get(key, SiteDiff((), tuple(own), rows))
        alike[key] = replace(known, paths=(*known.paths, path))
    return list(alike.values())


class _Stage:
    """A graph, read once for all its sites."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: list[Node] = list(graph.nodes)
        self._order = {node: i for i, node in enumerate(self._nodes)}
        self._named = {node.name: node for node in self._nodes}
        self._inside: dict[str, list[Node]] = {}
        path = ""
        # What a rule wrote may carry no module: it belongs to that of its reader.
        for node in reversed(self._nodes):
            path = module_path(node) if node.meta.get("nn_module_stack") else path
            if node.op not in ("placeholder", "output"):
                self._inside.setdefault(path, []).append(node)

    def lines(self, path: str, events: Sequence[Event], whole: bool) -> list[Line]:
        """The nodes of the module at ``path`` if ``whole``, those of ``events``, and what they read
        and are read by, in the graph's order."""
        marks = _marks(events)
        own = {self._named[name] for name in marks if name in self._named}
        if whole:
            inside = (p for p in self._inside if p == path or p.startswith(f"{path}."))
            own.update(node for p in inside for node in self._inside[p])
        near = {n for node in own for n in (*node.all_input_nodes, *node.users)}
        shown = own | {node for node in near if not _is_weight(node)}
        ordered = sorted(shown, key=self._order.__getitem__)
        numbers = {node.name: str(i) for i, node in enumerate(ordered)}
        return [self._line(node, shown, numbers, marks.get(node.name, {})) for node in ordered]

    def _line(
        self, node: Node, shown: set[Node], numbers: dict[str, str], marks: dict[str, str]
    ) -> Line:
        value, path = _value(node), module_path(node)
        mark = next((m for m in _MARKS if m in marks.values()), "")
        if node.op == "output":
            read = [n.name for n in node.all_input_nodes if n in shown]
            code = f"..., {', '.join(read)}, ..."
        else:
            code = _code(node, lambda n: short_name(n.name))
        generic = _code(node, lambda n: numbers.get(n.name, "_")) if node.op != "output" else ""
        generic = _SYMBOL.sub("s", f"{generic}: {value}")
        return Line(node.name, code, value, path, generic, tuple(sorted(marks)), mark)


def _marks(events: Sequence[Event]) -> dict[str, dict[str, str]]:
    """For the name of each node that rules matched, wrote or refused: the rules, and which."""
    marks: dict[str, dict[str, str]] = {}
    for event in events:
        touched = dict.fromkeys([event.node], "matched")
        touched |= dict.fromkeys(event.erased, "matched") | dict.fromkeys(event.wrote, "written")
        if not event.fired:
            culprits = [event.node, *_CULPRIT.findall(event.detail)]
            touched = dict.fromkeys(culprits, "refused" if event.required else "left")
        for name, mark in touched.items():
            marks.setdefault(name, {}).setdefault(event.rule, mark)
    return marks


def _aligned(before: Sequence[Line], after: Sequence[Line]) -> Iterator[Row]:
    """Lines of the same name side by side, in the order of both."""
    left, right = ([line.name for line in lines] for lines in (before, after))
    for _, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        yield from starmap(Row, zip_longest(before[i:j], after[k:m]))


def short_name(name: str) -> str:
    """The name of a node; of a placeholder, which Dynamo names after its source, that source."""
    if not name.startswith("l_"):
        return name
    name = re.sub(r"^l_(?:self_|kwargs_|args_)?(?:modules_)?", "", name).rstrip("_")
    return re.sub(r"_(?:modules|parameters|buffers)_|_(?=\d+_)|(?<=\d)_", ".", name)


def _is_weight(node: Node) -> bool:
    if node.op == "get_attr":
        return True
    return node.op == "placeholder" and node.name.startswith("l_self_")


def _value(node: Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"


def _code(node: Node, name: Callable[[Node], str]) -> str:
    """The call of ``node`` as Python would write it."""

    def shown(x: Any) -> str:
        if isinstance(x, Node):
            return name(x)
        if isinstance(x, tuple | list):
            inner = ", ".join(map(shown, x))
            return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
        if isinstance(x, slice):
            return ":".join("" if e is None else shown(e) for e in _ends(x))
        if callable(x):
            return str(getattr(x, "__name__", x))
        plain = isinstance(x, torch.dtype | torch.device)
        return "..." if x is Ellipsis else str(x) if plain else repr(x)

    if node.op in ("placeholder", "get_attr"):
        return "argument" if node.op == "placeholder" else str(node.target)
    args = [shown(x) for x in node.args]
    args += [f"{key}={shown(x)}" for key, x in node.kwargs.items()]
    if op_name(node) == "getitem" and len(node.args) == 2:
        index = node.args[1]
        inner = ", ".join(map(shown, index)) if isinstance(index, tuple) else shown(index)
        return f"{args[0]}[{inner}]"
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    called = str(getattr(node.target, "__name__", node.target))
    if called in magic_methods and getattr(operator, called, None) is node.target:
        return magic_methods[called].format(*args)
    return f"{called}({', '.join(args)})"


def _ends(x: slice) -> Iterable[Any]:
    return (x.start, x.stop) if x.step is None else (x.start, x.stop, x.step)


def _generic(detail: str, numbers: dict[str, str]) -> str:
    return _CULPRIT.sub(lambda found: f"(at {numbers.get(found[1], '_')})", detail)
