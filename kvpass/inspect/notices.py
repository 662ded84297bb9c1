"""What the user is told of a graph: warnings, the log, and what tlparse shows."""

from __future__ import annotations

import logging
import warnings
from functools import partial

from torch.fx import GraphModule

from kvpass._torch import trace_artifact
from kvpass.errors import UnmatchedGraphError
from kvpass.inspect.explain import describe
from kvpass.inspect.report import GraphReport

log = logging.getLogger(__name__)


def warn_of_refusals(report: GraphReport, strict: bool) -> None:
    """Warns of what was refused, or raises if the user asked for that."""
    refused = [e for e in report.events if not e.fired and e.required]
    if strict and (refused or not report.events):
        reason = f"{refused[0].rule}: {refused[0].detail}" if refused else "it updates no KV cache"
        raise UnmatchedGraphError(
            f"strict is set and graph {report.index} cannot be rewritten: {reason}. "
            "Without strict it would run unchanged."
        )
    if refused:
        report.warnings.append(
            f"{len(refused)} of {len(report.events)} rewrites were refused, and that part of the "
            f"model runs unchanged. The first: {refused[0].path}: {refused[0].rule}: "
            f"{refused[0].detail}"
        )
    for message in report.warnings:
        warnings.warn(f"kvpass: {message}.", stacklevel=2)


def warn_once(message: str, report: GraphReport) -> None:
    """Warns, and notes it in the report; once per graph."""
    if message not in report.warnings:
        report.warnings.append(message)
        warnings.warn(f"kvpass: {message}.", stacklevel=2)


def publish(report: GraphReport) -> None:
    """Shows the graphs to tlparse (TORCH_TRACE), and what was done in the log (TORCH_LOGS)."""
    for stage in ("before", "after", "bound"):
        graph: GraphModule = getattr(report, stage)
        text = partial(graph.print_readable, print_output=False)
        trace_artifact(f"kvpass_{report.index}_{stage}", text)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", describe(report), report.after.print_readable(print_output=False))
