"""`Cell`: how one cache tensor of a layer is stored, or why it is not packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.logical_calls import AppendCall
from kvpass.inspect.report import GraphReport
from kvpass.rules import Event
from kvpass.rules.decode_reader import DecodeReader
from kvpass.rules.quantize_cache import QuantizeCache
from kvpass.rules.quantize_static import QuantizeStatic

_UPDATES = (QuantizeCache.name, QuantizeStatic.name)


@dataclass(frozen=True)
class Cell:
    """One cache tensor of a layer, as one graph leaves it.

    Attributes:
        path: of the layer.
        role: ``keys``, ``values`` or ``unknown``.
        node: the name of the node that updates it.
        shape: ``[B, H, T, D]``, sizes or symbols; None if it has other dimensions.
        dtype: the model's own.
        plan: how it is stored; None if its update was refused.
        reason: why it was refused.
        decoded: why it is decoded in front of its readers; empty if it is not.
    """

    path: str
    role: str
    node: str
    shape: tuple[int | torch.SymInt, ...] | None
    dtype: torch.dtype
    plan: TensorPlan | None = None
    reason: str = ""
    decoded: str = ""

    @property
    def packed(self) -> bool:
        """Whether any of its tokens are stored in fewer bits than the model's."""
        return self.plan is not None and not all(codec.identity for codec in self.plan.codecs)

    @property
    def bits(self) -> str:
        """Bits of a code, or of an element that is stored as it is."""
        own = f"{8 * self.dtype.itemsize}"
        if not self.packed:
            return own
        assert self.plan is not None
        codecs = self.plan.codecs if isinstance(self.plan, ChunkedPlan) else (self.plan.codec,)
        return "/".join(own if codec.identity else f"{codec.bits:g}" for codec in codecs)

    @property
    def why_plain(self) -> str:
        """Why a tensor with a plan is not packed."""
        assert self.plan is not None
        # By the recipe, or since its exact window would hold all of a sliding one: plans are equal.
        if self.plan.window_size is not None:
            return f"{self.bits} bit, in a sliding window of {self.plan.window_size} tokens"
        return f"{self.bits} bit, as the recipe says"

    @property
    def codec(self) -> str:
        """The codec in few words: of lists with a number for each group, the extremes."""
        return "" if self.plan is None else self.plan.summary().split("/")[0]


def model_cells(graphs: Sequence[GraphReport]) -> dict[str, list[Cell]]:
    """The cache tensors of each layer, by its path, as the last graph with that layer leaves
    them."""
    found: dict[str, list[Cell]] = {}
    for report in graphs:
        own: dict[str, list[Cell]] = {}
        for cell in graph_cells(report):
            own.setdefault(cell.path, []).append(cell)
        found |= own
    return found


def graph_cells(report: GraphReport) -> Iterator[Cell]:
    """The cache tensors that one graph updates."""
    before = {node.name: node for node in report.before.graph.nodes}
    after = {node.name: node for node in report.after.graph.nodes}
    for event in report.events:
        if (role := report.roles.get(event.node)) is None:
            continue
        if not event.fired and event.rule in _UPDATES:
            yield Cell(event.path, role, event.node, *_form(before.get(event.node)),
                       reason=event.detail)  # fmt: skip
        elif event.fired:
            written = [after[name] for name in sorted(event.wrote & after.keys())]
            call = next(((n, c) for n in written if (c := AppendCall.of(n)) is not None), None)
            if call is not None:
                decoded = _decoded(call[0], report.events)
                yield Cell(event.path, role, event.node, *_form(call[0]), call[1].parsed,
                           decoded=decoded)  # fmt: skip
            elif (node := after.get(event.node)) is not None and "pack_after" in node.meta:
                update, plan, _ = node.meta["pack_after"]
                yield Cell(event.path, role, event.node, *_form(update.buffer), plan)


def _form(node: Node | None) -> tuple[tuple[int | torch.SymInt, ...] | None, torch.dtype]:
    value = None if node is None else node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None, torch.get_default_dtype()
    return (tuple(value.shape) if value.dim() == 4 else None), value.dtype


def _decoded(append: Node, events: Sequence[Event]) -> str:
    """Why what ``append`` returns is decoded, if a rule did that."""
    reasons = (e.detail for e in events if e.rule == DecodeReader.name and e.node == append.name)
    return next(reasons, "")
