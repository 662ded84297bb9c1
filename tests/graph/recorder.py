"""A ``torch.compile`` backend that applies the rules, runs both graphs and keeps what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.testing import assert_close

from kvpass._torch import copy_source
from kvpass.format.retention import MAX_STEP
from kvpass.graph.analysis.sites import Sites, find_sites
from kvpass.graph.verify import verify_rewritten
from kvpass.plan import Planner
from kvpass.recipes import recipe
from kvpass.rules import DECODING, Context, Event, apply_rules
from kvpass.tensor.packed import PackedKV
from tests.strategies import randn, rounded


@dataclass
class Record:
    """One graph: before and after the rules, and the results of its last call."""

    before: GraphModule
    after: GraphModule
    sites: Sites
    events: list[Event]
    # For every cache update: positions of the past among the arguments (or None) and of the result.
    updates: list[tuple[int | None, int]]
    args: tuple[Any, ...] = ()
    results: list[Any] = field(default_factory=list)

    def fired(self, rule: str) -> int:
        """How often a rule was applied."""
        return sum(event.fired for event in self.events if event.rule == rule)

    def refused(self) -> list[tuple[str, str]]:
        """Rules and reasons."""
        return [(event.rule, event.detail) for event in self.events if not event.fired]

    def check(self, atol: float) -> None:
        """The rewritten graph answers what the original one does on the decoded cache.

        A step of up to MAX_STEP tokens first packs what is due: the original graph gets that past.
        """
        args = [a.decode() if isinstance(a, PackedKV) and not a.stale else a for a in self.args]
        for past, result in self.updates:
            packed = self.results[result]
            if past is None or not isinstance(packed, PackedKV):
                continue
            before = self.args[past]
            new = packed.written - before.written
            if new <= MAX_STEP:
                args[past] = readable(packed, before.shape[2] + new)[:, :, : before.shape[2]]
        expected = self.before(*args)
        for got, plain in zip(self.results, expected, strict=True):
            if not isinstance(got, PackedKV):
                assert type(got) is type(plain)
                assert_close(got, plain, rtol=0, atol=atol)
                continue
            packed = 0 if got.plan.codec.identity else int(got.segment_ends[0, -2])
            count = max(0, packed - (got.written - got.shape[2]))
            assert got.shape == plain.shape
            assert_close(got.decode()[:, :, count:], plain[:, :, count:], rtol=0, atol=atol)
        for past, result in self.updates:
            if past is None and isinstance(packed := self.results[result], PackedKV):
                count = packed.plan.packed(packed.written) - (packed.written - packed.shape[2])
                if packed.plan.window_size is None:
                    fresh = stored_once(expected[result], packed, count)
                    assert_close(packed.decode(), fresh, rtol=0, atol=0)


def readable(packed: PackedKV, tokens: int) -> Tensor:
    """The last ``tokens`` tokens, of which a ring holds more than its handle stands for."""
    plan = str(packed.plan)
    out: Tensor = torch.ops.kvpass.unpack.default(packed.state, tokens, plan, packed.dtype)
    return out if packed.basis is None else packed.basis.restore(out)


def stored_once(x: Tensor, packed: PackedKV, count: int) -> Tensor:
    """``x`` as a first prompt comes back of which ``count`` tokens were packed like ``packed``."""
    if packed.basis is None:
        return rounded(x, packed.plan, count)
    return packed.basis.restore(rounded(packed.basis.store(x), packed.plan, count))


class Recorder:
    """Compiles as ``backend``, see the module's docstring."""

    def __init__(self, planner: Planner | None = None) -> None:
        self.planner = planner or recipe("fp")
        self.records: list[Record] = []

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        before, after = copied(gm), copied(gm)
        context = Context(after.graph, find_sites(after.graph), self.planner)
        inputs = list(after.graph.find_nodes(op="placeholder"))
        outputs = list(after.graph.output_node().args[0])
        updates = [
            (None if u.past is None else inputs.index(u.past), outputs.index(u.returned))
            for cat, u in context.sites.updates.items()
        ]
        events = apply_rules(context)
        apply_rules(context, DECODING)
        verify_rewritten(after.graph)
        after.recompile()
        record = Record(before, after, find_sites(before.graph), events, updates)
        self.records.append(record)

        def call(*args: Any) -> Any:
            record.args, record.results = args, after(*args)
            return record.results

        return call


def copied(gm: GraphModule) -> GraphModule:
    """A copy of Dynamo's graph, sources included."""
    mapping: dict[Any, Any] = {}
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, mapping))
    for old, new in mapping.items():
        copy_source(old, new)
    return GraphModule(gm, graph)


class Layer:
    """What Dynamo sees of a cache layer."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As in transformers' DynamicLayer."""
        empty = torch.tensor([], dtype=k.dtype)
        self.keys = torch.cat([empty if self.keys is None else self.keys, k], dim=-2)
        self.values = torch.cat([empty if self.values is None else self.values, v], dim=-2)
        return self.keys, self.values


def run(
    attend: Callable[..., Any],
    lengths: list[int],
    planner: Planner | None = None,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    **kwargs: Any,
) -> list[Record]:
    """Compiles ``attend(q, k, v, layer, **kwargs)`` and runs steps of these lengths, checked.
    ``heads`` are those of queries and of keys and values."""
    recorder, layer = Recorder(planner), Layer()
    compiled = torch.compile(attend, backend=recorder, fullgraph=True)
    with torch.no_grad():
        for i, n in enumerate(lengths):
            q = randn(batch, heads[0], n, 16, seed=3 * i)
            k, v = (randn(batch, heads[1], n, 16, seed=3 * i + j) for j in (1, 2))
            compiled(q, k, v, layer, **kwargs)
            recorder.records[-1].check(atol=2e-6)
    return recorder.records
