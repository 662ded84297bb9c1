"""`explain`: what kvpass did to a model, in words, and its graphs to look at."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from kvpass.inspect.report import GraphReport, reports
from kvpass.tensor.dispatch import DECODES
from kvpass.tensor.packed import PackedKV
from kvpass.tensor.size import held_bytes, stored_bits


@dataclass(frozen=True)
class Explanation:
    """The compiled graphs of a model. Print it for a summary.

    Attributes:
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

    def save(self, folder: str | Path) -> list[Path]:
        """Writes the summary, the graphs of every stage and the generated kernels.

        Returns:
            The files written.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        texts = {"explain.txt": str(self)}
        for report in self.graphs:
            for stage in ("before", "after", "bound"):
                module = getattr(report, stage)
                name = f"graph_{report.index}_{stage}.py"
                texts[name] = module.print_readable(print_output=False)
        written = []
        for name, text in texts.items():
            (target / name).write_text(text)
            written.append(target / name)
        kernels = {kernel for report in self.graphs for kernel in report.kernels()}
        written += [Path(shutil.copy(kernel, target)) for kernel in sorted(kernels)]
        return written


def explain(model: torch.nn.Module) -> Explanation:
    """What kvpass did to ``model``: what fired, what was refused and why, codecs, providers,
    bytes."""
    inner = getattr(model, "_orig_mod", model)
    found = tuple(report for report in reports() if report.belongs_to(inner))
    return Explanation(type(inner).__name__, found)


def describe(report: GraphReport) -> str:
    """One graph in words."""
    total = sum(report.seconds.values())
    lines = [
        f"\ngraph {report.index}: {report.kind}, recipe {report.recipe}, run by {report.inner}, "
        f"compiled in {total:.1f} s"
    ]
    by_path: dict[str, list[str]] = {}
    for event in report.events:
        mark = "fired  " if event.fired else "REFUSED" if event.required else "left   "
        by_path.setdefault(event.path, []).append(f"{mark} {event.rule}: {event.detail}")
    for texts, group in groupby(by_path.items(), key=lambda item: item[1]):
        paths = [path or "(top level)" for path, _ in group]
        span = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} layers)"
        lines.append(f"  {span}")
        lines += [f"    {text}" for text in texts]
    identities = dict.fromkeys((e.rule, e.identity) for e in report.events if e.identity)
    for rule, identity in identities:
        lines += [f"  {rule}: {line}" for line in identity.split("\n")]
    if not report.events:
        lines.append("  nothing to rewrite: the graph runs unchanged")
    lines += _providers(report)
    lines += [f"  warning: {message}" for message in report.warnings]
    lines += _bytes(report)
    return "\n".join(lines)


def _providers(report: GraphReport) -> list[str]:
    chosen = Counter((c.op, c.provider, c.declined) for c in report.choices)
    lines = []
    for (op, provider, declined), count in chosen.items():
        reasons = "".join(f"; {name} declined: {reason}" for name, reason in declined)
        lines.append(f"  op {op}: {provider} x{count}{reasons}")
    return lines


def _bytes(report: GraphReport) -> list[str]:
    handles = [h for ref in report.live if isinstance(h := ref(), PackedKV)]
    current = [h for h in handles if not h.stale]
    if not current:
        return []
    held = held_bytes(current)
    plain = sum(h.numel() * h.dtype.itemsize for h in current)
    bits = stored_bits(current)
    layouts = {h.plan.summary(): h.plan.layout for h in current}
    return [
        *(f"  state of {plan}: {layout}" for plan, layout in layouts.items()),
        f"  cache now: {len(current)} tensors of {current[0].shape[2]} tokens, {held:,} bytes held "
        f"({plain:,} in {current[0].dtype}), {bits:.2f} bits per element",
    ]
