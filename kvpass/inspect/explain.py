"""`explain`: what kvpass did to a model, in words, and its graphs to look at."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from kvpass.errors import OptionError, shown_path
from kvpass.inspect.report import GraphReport, reports
from kvpass.tensor.dispatch import DECODES
from kvpass.tensor.size import held_bytes, stored_bits


@dataclass(frozen=True)
class Explanation:
    """The compiled graphs of a model. Print it for a summary.

    Attributes:
        model: the name of its class.
        graphs: one report per compiled graph; ``.before``, ``.after`` and ``.bound`` are FX graph
            modules.
    """

    model: str
    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                f"kvpass has compiled no graph of {self.model}. Call the model first, after "
                'model.compile(backend="kvpass"); torch.compile(model).generate() would run the '
                "uncompiled forward."
            )
        parts = [f"kvpass: {len(self.graphs)} graph(s) of {self.model}"]
        parts += [describe(report) for report in self.graphs]
        if DECODES:
            listed = ", ".join(f"{op} x{count}" for op, count in DECODES.most_common())
            parts.append(f"decoded outside compiled code (all models): {listed}")
        return "\n".join(parts)

    __repr__ = __str__

    def html(self) -> str:
        """A page that shows it: the summary, how each layer is stored, its part of every graph
        before and after, the generated kernels, and bytes against tokens, computed of the plans.

        It loads nothing from elsewhere.
        """
        # Here, since importing kvpass must not import what highlights sources.
        from kvpass.inspect.page import render

        return render(self.model, self.graphs, str(self))

    def save_html(self, path: str | Path) -> Path:
        """Writes `html` to a file, and returns its path.

        Raises:
            OptionError: if the path is a folder.
        """
        target = Path(path)
        if target.is_dir():
            raise OptionError(f"{shown_path(path)} is a folder; allowed: the path of a file.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html(), encoding="utf-8")
        return target

    def save(self, folder: str | Path) -> list[Path]:
        """Writes the summary, the graphs of every stage and the generated kernels; returns the
        files."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        texts = {"explain.txt": str(self)}
        for report in self.graphs:
            for stage in ("before", "after", "bound"):
                text = getattr(report, stage).print_readable(print_output=False)
                texts[f"graph_{report.index}_{stage}.py"] = text
        for name, text in texts.items():
            (target / name).write_text(text)
        kernels = sorted({kernel for report in self.graphs for kernel in report.kernels()})
        return [
            *(target / name for name in texts),
            *(Path(shutil.copy(kernel, target)) for kernel in kernels),
        ]


def explain(model: torch.nn.Module) -> Explanation:
    """What kvpass did to ``model``: rules that fired, or refused and why, providers, bytes."""
    inner = getattr(model, "_orig_mod", model)
    found = tuple(report for report in reports() if report.belongs_to(inner))
    return Explanation(type(inner).__name__, found)


def describe(report: GraphReport) -> str:
    """One graph in words."""
    count, kinds = report.regions
    regions = "" if count == 1 else f" in {count} regions of {kinds} kinds"
    lines = [
        f"\ngraph {report.index}: {report.kind}, recipe {report.recipe}, run by {report.inner}"
        f"{regions}, compiled in {sum(report.seconds.values()):.1f} s"
    ]
    by_path: dict[str, list[str]] = {}
    for event in report.events:
        mark = "fired  " if event.fired else "REFUSED" if event.required else "left   "
        by_path.setdefault(event.path, []).append(f"{mark} {event.rule}: {event.detail}")
    for texts, group in groupby(by_path.items(), key=lambda item: item[1]):
        paths = [path or "(top level)" for path, _ in group]
        span = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} layers)"
        lines += [f"  {span}", *(f"    {text}" for text in texts)]
    for rule, identity in dict.fromkeys((e.rule, e.identity) for e in report.events if e.identity):
        lines += [f"  {rule}: {line}" for line in identity.split("\n")]
    if not report.events:
        lines.append("  nothing to rewrite: the graph runs unchanged")
    for (op, provider, declined), count in report.chosen.items():
        reasons = "".join(f"; {name} declined: {reason}" for name, reason in declined)
        lines.append(f"  op {op}: {provider} x{count}{reasons}")
    if report.replay_obstacle is not None:
        lines.append(f"  steps are not replayed, for {report.replay_obstacle}")
    lines += [f"  warning: {message}" for message in report.warnings]
    return "\n".join([*lines, *_cache_now(report)])


def _cache_now(report: GraphReport) -> list[str]:
    """The state, the size and the bits of the cache tensors that the last call returned."""
    if not (handles := report.handles):
        return []
    plain = sum(h.numel() * h.dtype.itemsize for h in handles)
    layouts = {h.plan.summary(): h.plan.layout for h in handles}
    return [
        *(f"  state of {plan}: {layout}" for plan, layout in layouts.items()),
        f"  cache now: {len(handles)} tensors of {handles[0].shape[2]} tokens, "
        f"{held_bytes(handles):,} bytes held ({plain:,} in {handles[0].dtype}), "
        f"{stored_bits(handles):.2f} bits per element",
    ]
