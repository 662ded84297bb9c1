"""`GraphReport`: what happened to one graph. `kvpass.explain` collects them."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from kvpass.rules import Event
from kvpass.tensor.packed import PackedKV

if TYPE_CHECKING:
    from lowering import Choice


@dataclass(eq=False)
class GraphReport:
    """One compiled graph.

    Attributes:
        index: in the order of compilation.
        recipe: the name of the recipe or plan.
        before, after: Dynamo's graph, and the graph after the rules; ``print_readable()`` shows
            them.
        bound: the graph as it was compiled, on inner tensors.
        events: what each rule did or refused.
        roles: what attention reads each cache update as (``keys``, ``values``, ``unknown``), by the
            name of its node.
        choices: which provider runs each op, and who declined.
        warnings: messages for the user.
        inner: what compiled the graph.
        regions: of how many regions it consists, and how many were compiled: those that are alike
            once.
        capture_obstacle: why no step of it can be replayed; None if CUDA graphs may.
        replay_obstacle: why none is, though the mode lets it be on a CPU.
        seconds: for each named pass.
        kernels: returns the generated source files of this process so far, and the op of each.
        live: the cache tensors that the last call returned.
    """

    index: int
    recipe: str
    before: GraphModule
    after: GraphModule
    bound: GraphModule
    events: list[Event] = field(default_factory=list)
    roles: Mapping[str, str] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    inner: str = "inductor"
    regions: tuple[int, int] = (1, 1)
    capture_obstacle: str | None = None
    replay_obstacle: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    kernels: Callable[[], Mapping[Path, str]] = dict
    live: list[weakref.ref[PackedKV]] = field(default_factory=list)
    _parameters: list[weakref.ref[Any]] = field(default_factory=list, repr=False)

    @property
    def kind(self) -> str:
        """``decode`` if the graph extends a packed cache, ``prefill`` if it makes one, ``plain
        step`` if a plain static cache is packed when the graph has run."""
        ops = {choice.op for choice in self.choices}
        if any("pack_after" in node.meta for node in self.after.graph.nodes):
            return "plain step"
        if any(op.startswith(("append", "extend")) for op in ops):
            return "decode"
        return "prefill" if "pack" in ops or "reorder_chunks" in ops else "no packed cache"

    @property
    def handles(self) -> list[PackedKV]:
        """The cache tensors of the last call that are alive and not stale."""
        return [h for ref in self.live if isinstance(h := ref(), PackedKV) and not h.stale]

    @property
    def chosen(self) -> Counter[tuple[str, str, tuple[tuple[str, str], ...]]]:
        """Ops with their provider and those who declined, and how many nodes have them."""
        return Counter((c.op, c.provider, c.declined) for c in self.choices)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time spent to ``seconds``."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def belongs_to(self, model: torch.nn.Module) -> bool:
        """Whether the graph was called with a parameter of ``model``."""
        own = {id(p) for p in model.parameters()}
        return any((p := ref()) is not None and id(p) in own for ref in self._parameters)


_lock = threading.Lock()
_reports: weakref.WeakSet[GraphReport] = weakref.WeakSet()
_numbers = count()


def new_report(recipe: str, before: GraphModule, example_inputs: Sequence[Any]) -> GraphReport:
    """A report that lives as long as the compiled graph holds it."""
    report = GraphReport(next(_numbers), recipe, before, before, before)
    parameters = (x for x in example_inputs if isinstance(x, torch.nn.Parameter))
    report._parameters = [weakref.ref(x) for x in parameters]
    with _lock:
        _reports.add(report)
    return report


def reports() -> list[GraphReport]:
    """All living reports, oldest first."""
    with _lock:
        return sorted(_reports, key=lambda report: report.index)
