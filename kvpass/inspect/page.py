"""The page of `Explanation.html`: what kvpass did to a model, as one file of HTML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pygments import format as formatted
from pygments import lex, token
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from kvpass.format.dtypes import dtype_name
from kvpass.inspect.cells import Cell, model_cells
from kvpass.inspect.chart import HEIGHT, LEFT, TOP, WIDTH, cache_points, chart, readable
from kvpass.inspect.report import GraphReport
from kvpass.inspect.site_diff import SiteDiff, short_name, site_diffs
from kvpass.rules import Event
from kvpass.tensor.size import held_bytes, stored_bits

# Lines that a kernel begins with as another one does are left out if there are so many.
_MOST_REPEATED = 40
# Bytes of source, before it is highlighted.
_MOST_SOURCE = 400_000
_LANGUAGES = {".py": "Python, with Triton", ".cpp": "C++"}


@dataclass(frozen=True)
class CacheNow:
    """The cache tensors that the last call returned.

    Attributes:
        tensors, tokens: their number, and their length.
        held, plain: bytes, and those of a plain cache in 16 bits.
        bits: that store one element, spare room left out.
    """

    tensors: int
    tokens: int
    held: int
    plain: int
    bits: float


@dataclass(frozen=True)
class Layer:
    """A layer of the map.

    Attributes:
        path, number: of the module, and the first number in its path, or the path.
        cells: its cache tensors, keys first.
        events: what rules did there, by the index of the graph.
        diffs: the anchors of the diffs that show it.
    """

    path: str
    number: str
    cells: tuple[Cell, ...]
    events: dict[int, list[Event]]
    diffs: dict[int, str]


@dataclass(frozen=True)
class Kernel:
    """A generated source file.

    Attributes:
        name, language: of the file.
        op: the stem of its kernels.
        lines: their number.
        skipped: how many lines at the beginning are those of ``like``, and left out.
        text: the others, highlighted.
    """

    name: str
    language: str
    op: str
    lines: int
    skipped: int
    like: str
    text: Markup


def render(model: str, graphs: Sequence[GraphReport], summary: str) -> str:
    """The page.

    Args:
        model: the name of its class.
        graphs: the compiled ones.
        summary: the same in words.
    """
    cells = model_cells(graphs)
    diffs = {report.index: site_diffs(report, list(cells)) for report in graphs}
    layers = [_layer(path, own, graphs, diffs) for path, own in cells.items()]
    recent, left_out = recent_files(graphs)
    points = cache_points([cell for own in cells.values() for cell in own])
    return _environment().get_template("page.html.jinja").render(
        model=model,
        graphs=graphs,
        summary=summary,
        now=cache_now(graphs),
        layers=layers,
        legend=legend(cell for layer in layers for cell in layer.cells),
        diffs=diffs,
        kernels=kernels(recent),
        left_out=left_out,
        chart=chart(points) if points and cells else None,
        dtypes=sorted({dtype_name(c.dtype) for own in cells.values() for c in own}),
        area={"left": LEFT, "top": TOP, "width": WIDTH, "height": HEIGHT},
        warnings=list(dict.fromkeys(m for report in graphs for m in report.warnings)),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters.update(
        readable=readable, short=short_name, spans=spans, tint=tint, formula=formula
    )
    environment.globals.update(by_rule=by_rule, fired=fired, anchor=anchor)
    return environment


def cache_now(graphs: Iterable[GraphReport]) -> CacheNow | None:
    """The cache of the last call that returned one that still lives."""
    for report in reversed(list(graphs)):
        if handles := report.handles:
            plain = 2 * sum(handle.numel() for handle in handles)
            tokens = handles[0].shape[2]
            return CacheNow(
                len(handles), tokens, held_bytes(handles), plain, stored_bits(handles)
            )  # fmt: skip
    return None


def _layer(
    path: str,
    cells: Sequence[Cell],
    graphs: Sequence[GraphReport],
    diffs: dict[int, list[SiteDiff]],
) -> Layer:
    number = re.search(r"\d+", path)
    order = ("keys", "values", "unknown")
    inside = {
        report.index: [e for e in report.events if e.path == path or e.path.startswith(f"{path}.")]
        for report in graphs
    }
    shown = {
        index: anchor(index, i)
        for index, found in diffs.items()
        for i, diff in enumerate(found)
        if path in diff.paths
    }
    ordered = sorted(cells, key=lambda cell: order.index(cell.role))
    return Layer(path, number[0] if number else path, tuple(ordered), inside, shown)


def anchor(graph: int, diff: int) -> str:
    """The id of a diff in the page."""
    return f"graph-{graph}-site-{diff}"


def fired(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Events that say the same, once each, and how often."""
    said = Counter((e.rule, e.detail, e.fired) for e in events)
    first = {(e.rule, e.detail, e.fired): e for e in reversed(list(events))}
    return [(first[key], count) for key, count in said.items()]


def by_rule(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each rule, in the order in which rules first appear."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.rule, []).append(event)
    return found


def formula(identity: str) -> str:
    """An identity with its right sides on lines of their own."""
    return re.sub(r"  ([=~])  ", r"\n  \1 ", identity)


def spans(paths: Sequence[str]) -> str:
    """The numbers of layers in runs, ``0 ... 4, 6 ... 10``; paths without a number as they are."""
    found = [re.search(r"\d+", path) for path in paths]
    if not all(found):
        return ", ".join(path or "(top level)" for path in paths)
    numbers = sorted({int(number[0]) for number in found if number})
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    joined = {0: "", 1: ", "}
    runs = (
        f"{a}{joined.get(b - a, ' ... ')}{b if b > a else ''}"
        for a, b in zip(starts, ends, strict=True)
    )
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(runs)}"


def tint(cell: Cell) -> str:
    """The class of a cell's colour."""
    if cell.plan is None:
        return "refused"
    if not cell.packed:
        return "plain"
    return "mixed" if "/" in cell.bits else f"bits{int(float(cell.bits))}"


def legend(cells: Iterable[Cell]) -> list[Cell]:
    """A cell of each kind: by bits, then those that are not packed, then the refused."""
    kinds = {(cell.bits, cell.packed, cell.plan is None): cell for cell in cells}
    order = [(x.plan is None, not x.packed, float(x.bits.split("/")[0]), x) for x in kinds.values()]
    return [cell for *_, cell in sorted(order, key=lambda item: item[:3])]


def recent_files(graphs: Iterable[GraphReport]) -> tuple[dict[Path, str], int]:
    """The source files that this process generated last, with their ops, as many as a page should
    have; and how many others there are, which may belong to other models."""
    files = {path: op for report in graphs for path, op in report.kernels().items()}
    files = {path: op for path, op in files.items() if path.exists()}
    room, recent = _MOST_SOURCE, {}
    for path, op in reversed(files.items()):
        room -= path.stat().st_size
        if room < 0:
            break
        recent[path] = op
    return recent, len(files) - len(recent)


def kernels(files: Mapping[Path, str]) -> list[Kernel]:
    """These source files, each op's together."""
    shown: list[Kernel] = []
    texts: dict[str, list[str]] = {}
    for path, op in sorted(files.items(), key=lambda item: (item[1], item[0].name)):
        lines = path.read_text(encoding="utf-8").splitlines()
        like, skipped = "", 0
        for other, known in texts.items():
            pairs = zip(known, lines, strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if length > max(skipped, _MOST_REPEATED):
                like, skipped = other, length
        texts[path.name] = lines
        text = _highlighted("\n".join(lines[skipped:]), path.name)
        language = _LANGUAGES.get(path.suffix, path.suffix)
        shown.append(Kernel(path.name, language, op, len(lines), skipped, like, text))
    return shown


def _highlighted(text: str, file: str) -> Markup:
    """``text`` with a span around every comment, keyword, string, number and defined name."""
    kept = (
        token.Comment.Preproc,
        token.Comment,
        token.Keyword,
        token.String,
        token.Number,
        token.Name.Function,
    )

    def coarse(kind: Any) -> Any:
        return next((k for k in kept if kind in k), token.Token)

    tokens = ((coarse(kind), value) for kind, value in lex(text, get_lexer_for_filename(file)))
    return Markup(formatted(tokens, HtmlFormatter(nowrap=True)))
