"""The calls of logical ops in a graph, by the names of their arguments.

Nodes of ``kvpass.ops.logical`` have keyword arguments only, without those that have their default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch.fx import Graph, Node

from kvpass.format.parse import parse_plan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops import logical


@dataclass(frozen=True)
class LogicalCall:
    """The arguments of a node, as the logical op has them.

    Attributes:
        targets: the ops that take them.
    """

    targets: ClassVar[tuple[Callable[..., Any], ...]]

    @classmethod
    def of(cls, node: Node) -> Self | None:
        """The arguments of ``node``; None if it calls another op."""
        return cls(**node.kwargs) if node.target in cls.targets else None

    @classmethod
    def at(cls, node: Node) -> Self:
        """The arguments of ``node``, which calls such an op."""
        found = cls.of(node)
        assert found is not None, f"{node.name} is no {cls.__name__}"
        return found

    def insert(self, graph: Graph, target: Callable[..., Any] | None = None) -> Node:
        """A call where nodes are inserted now, of the first of `targets` or of ``target``."""
        return graph.call_function(target or self.targets[0], (), self._kwargs())

    def write(self, node: Node) -> None:
        """Makes these the arguments of ``node``."""
        node.args, node.kwargs = (), self._kwargs()

    def _kwargs(self) -> dict[str, Any]:
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: x for name, (x, default) in values.items() if x is not default}


@dataclass(frozen=True)
class AppendCall(LogicalCall):
    """See `kvpass.ops.logical.append`."""

    targets = (logical.append, logical.reorder_chunks)

    past: Node | None
    new: Node
    plan: str
    whole: bool = False
    basis: Node | None = None
    ranges: Node | None = None
    cos_sin: Node | None = None
    rope: str | None = None

    @property
    def parsed(self) -> TensorPlan:
        """The plan."""
        return parse_plan(self.plan)


@dataclass(frozen=True)
class AttentionCall(LogicalCall):
    """See `kvpass.ops.logical.attention`."""

    targets = (logical.attention,)

    q: Node
    keys: Node
    values: Node
    mask: Node | None
    scale: float
    sinks: Node | None = None
    causal: bool = False
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class PackedCall(LogicalCall):
    """See `kvpass.ops.logical.unpack`, and the others of one packed tensor."""

    targets = (logical.unpack, logical.stored, logical.slide, logical.length)

    packed: Node


@dataclass(frozen=True)
class BasisCall(LogicalCall):
    """See `kvpass.ops.logical.rotate_channels`."""

    targets = (logical.rotate_channels,)

    x: Node
    basis: Node


@dataclass(frozen=True)
class WeightBasisCall(LogicalCall):
    """See `kvpass.ops.logical.rotate_weight`."""

    targets = (logical.rotate_weight,)

    weight: Node
    basis: Node
    dim: int


def behind_slides(packed: Node) -> Node:
    """What a sliding window was applied to."""
    while packed.target is logical.slide:
        packed = PackedCall.at(packed).packed
    return packed
