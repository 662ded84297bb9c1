"""What a rewrite rule is, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch.fx import Graph, Node

from kvpass.cache.order import ChannelOrder
from kvpass.cache.ranges import ChannelRanges
from kvpass.graph.aliases import changed_storages
from kvpass.graph.masks import Masks
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.sites import Sites
from kvpass.graph.writes import Writes
from kvpass.plan import LayerPlan
from kvpass.recipes import Planner, Recipe


@dataclass(frozen=True)
class Event:
    """What one rule did at one node, as `kvpass.explain` shows it.

    Attributes:
        rule: its name.
        node: the node's name.
        path: of the module that the node belongs to.
        fired: False if the rule refused.
        detail: what was done, or why it was refused and where.
        required: whether a refusal leaves a part of the cache unpacked or decoded.
    """

    rule: str
    node: str
    path: str
    fired: bool
    detail: str
    required: bool = True


@dataclass
class Context:
    """What is known of the graph under rewriting.

    Attributes:
        graph: the graph.
        sites: the analysis, by nodes of the original graph.
        planner: says how each layer is stored.
        packed: the ``append`` node that stands for each rewritten cat.
        orders: in which order the channels of a cache tensor that is still empty are to be stored,
            by the cat or the static buffer.
        ranges: of cache tensors that are still empty and have calibrated ones, likewise.
        rows: the cosines and sines that keys get when they are read, by those of the graph.
        warnings: what the user should be told.
    """

    graph: Graph
    sites: Sites
    planner: Planner
    packed: dict[Node, Node] = field(default_factory=dict)
    orders: dict[Node, ChannelOrder] = field(default_factory=dict)
    ranges: dict[Node, ChannelRanges] = field(default_factory=dict)
    rows: dict[tuple[object, object, str], Node] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def writes(self) -> Writes:
        """What the graph changes in place, made when it is first asked for."""
        return Writes(self.graph)

    @cached_property
    def masks(self) -> Masks:
        """The analysis of the graph's masks, made when it is first asked for."""
        return Masks(self.graph)

    @cached_property
    def changed(self) -> set[Node]:
        """What shares memory with something that is changed in place, see `changed_storages`. Their
        ``meta`` says so, too."""
        found = changed_storages(self.graph)
        for node in found:
            node.meta["changed"] = True
        return found

    def layer_plan(
        self, path: str, key_dim: int, value_dim: int, heads: tuple[int, int]
    ) -> LayerPlan:
        """The plan of a layer with these head dimensions and (query, KV) heads."""
        if isinstance(self.planner, Recipe) and (concern := self.planner.concern(*heads)):
            self.warnings.append(f"{path}: {concern}")
        plan = self.planner.layer_plan(path, key_dim, value_dim)
        plan.check(path, key_dim, value_dim, heads[1])
        return plan


class Rule(ABC):
    """A local rewrite. Subclasses state their identity in a comment above the class.

    Attributes:
        required: whether a refusal leaves a part of the cache unpacked or decoded; if not, it only
            costs time, and is neither warned of nor against ``strict``.
    """

    name: ClassVar[str]
    required: ClassVar[bool] = True

    @abstractmethod
    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Whether the rule applies at ``node``.

        Returns:
            The nodes it needs, by name; a `Miss` with the reason if it nearly applies; None if
            ``node`` is none of its business.
        """

    @abstractmethod
    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Rewrites the graph around ``node``. Returns what was done, for `kvpass.explain`."""
