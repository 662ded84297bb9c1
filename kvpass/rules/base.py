"""What a rewrite rule is, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch.fx import Graph, Node

from kvpass.format.channels import ChannelBasis
from kvpass.format.ranks import Ranks
from kvpass.format.shard import Shard
from kvpass.graph.analysis.effects import Writes, changed_storages
from kvpass.graph.analysis.masks import Masks
from kvpass.graph.analysis.sites import Sites
from kvpass.graph.pattern import Captures, Miss
from kvpass.plan import Planner


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
        identity: see `Rule`.
        erased, wrote: the names of the nodes that it took out of the graph, and put into it.
    """

    rule: str
    node: str
    path: str
    fired: bool
    detail: str
    required: bool = True
    identity: str = ""
    erased: frozenset[str] = frozenset()
    wrote: frozenset[str] = frozenset()


def origin_of(packed: Node) -> Node | None:
    """The cat or static buffer that a packed node stands for; None for a cache argument."""
    origin: Node | None = packed.meta.get("origin")
    return origin


# The name of a provider, and those that decline, with their reasons.
ServedBy = Callable[[Node], tuple[str, tuple[tuple[str, str], ...]]]


@dataclass
class Context:
    """What is known of the graph under rewriting.

    Attributes:
        graph: the graph.
        sites: the analysis, by nodes of the original graph.
        planner: says how each layer is stored.
        packed: the ``append`` node that stands for each rewritten cat or static buffer.
        cos_sin: the cosines and sines that keys get when they are read, by those of the graph.
        warnings: for the user.
        refused: why a rule was refused at a node, the first one.
        replayed: steps are to be replayed.
        served_by: the provider of a node of a bound graph, and why better ones decline.
        ranks: the processes that share the model's heads, if there are others.
        shard: the part of every sequence that this process holds; None: all of it.
    """

    graph: Graph
    sites: Sites
    planner: Planner
    packed: dict[Node, Node] = field(default_factory=dict)
    cos_sin: dict[tuple[object, object, str], Node] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    refused: dict[Node, str] = field(default_factory=dict)
    replayed: bool = False
    served_by: ServedBy = lambda node: ("aten", ())
    ranks: Ranks | None = None
    shard: Shard | None = None

    def provider_of(self, node: Node, target: Any, arguments: tuple[Any, ...]) -> str:
        """The name of the provider that ``target`` would be lowered to in the place of ``node``."""
        with self.graph.inserting_before(node):
            trial = self.graph.call_function(target, arguments)
        provider, _ = self.served_by(trial)
        self.graph.erase_node(trial)
        return provider

    def replaced(self, origin: Node, packed: Node, basis: ChannelBasis | None) -> None:
        """Notes that ``packed`` stands for ``origin``, a cat or a static buffer of `sites`, and in
        which basis a cache tensor that is still empty stores its channels."""
        self.packed[origin] = packed
        packed.meta |= {"origin": origin, "basis": basis}

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


class Rule(ABC):
    """A local rewrite.

    Attributes:
        name: as `kvpass.explain` prints it.
        identity: what it rewrites to what, one equation a line: ``=`` is exact, ``~`` is lossy.
        required: whether a refusal leaves a part of the cache unpacked or decoded; if not, it only
            costs time, and is neither warned of nor against ``strict``.
    """

    name: ClassVar[str]
    identity: ClassVar[str] = ""
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
