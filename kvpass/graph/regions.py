"""Cuts a graph into regions, one behind each layer, of which those that are alike are compiled once
(what PyTorch calls regional compilation). Nothing of the result depends on where the cuts are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kvpass._torch import tree_leaves
from kvpass._torch_sizes import is_unbacked
from kvpass.graph.analysis.sites import module_path
from kvpass.graph.spellings import op_name

# Fewer are compiled sooner in one piece.
_FEWEST_LAYERS = 3
# A layer's path: up to the first number.
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")
# Behind such an op nothing is fused with what came before: what crosses a cut is a tensor anyway.
_PRODUCTS = frozenset({"addmm", "bmm", "linear", "matmul", "mm"})
# What begins and ends a context, in which no cut may be.
_BEGINS = re.compile(r"_enter_|_increment_nesting$|_disable$")
_ENDS = re.compile(r"_exit_|_decrement_nesting$|_enable$")


@dataclass(frozen=True, eq=False)
class Region:
    """A part of a graph.

    Attributes:
        whole: the graph.
        nodes: those of the part, in their order.
        inputs: further nodes that they read.
        outputs: those that others read.
    """

    whole: GraphModule
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """Equal for regions that call the same on their inputs and on each other's results."""
        names = {node: ("node", n) for n, node in enumerate((*self.inputs, *self.nodes))}
        calls = [
            (node.op, node.target, repr(map_arg((node.args, node.kwargs), names.__getitem__)))
            for node in self.nodes
        ]
        return len(self.inputs), *calls, *(names[node] for node in self.outputs)

    @cached_property
    def module(self) -> GraphModule:
        """This part as a graph of its own, from the inputs to a list of the outputs."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            # Inductor's caches ask what methods are of.
            copies[node].meta["example_value"] = node.meta.get("example_value")
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in self.outputs])
        return GraphModule(self.whole, graph)


def find_regions(module: GraphModule) -> list[Region]:
    """The regions of a graph in their order; one alone where it cannot, or need not, be cut."""
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    cuts = _cuts(nodes)
    if len(cuts) < _FEWEST_LAYERS or not _may_be_cut(nodes, graph):
        cuts = []
    ends = [0, *(cut + 1 for cut in cuts), len(nodes)]
    bodies = [nodes[start:end] for start, end in pairwise(ends) if start < end]
    return [_region(module, body) for body in bodies]


def _cuts(nodes: Sequence[Node]) -> list[int]:
    """Positions of the last matrix product of each layer, where no context is open."""
    last: dict[str, int] = {}
    open_contexts = 0
    for position, node in enumerate(nodes):
        name = str(getattr(node.target, "__name__", node.target))
        open_contexts += bool(_BEGINS.search(name)) - bool(_ENDS.search(name))
        layer = _LAYER.match(module_path(node))
        product = op_name(node).removesuffix(".default") in _PRODUCTS
        if layer is not None and product and not open_contexts:
            last[layer.group()] = position
    return sorted(last.values())


def _may_be_cut(nodes: Sequence[Node], graph: Graph) -> bool:
    """Whether all that nodes pass to each other is in their arguments and results, whose sizes are
    those of the graph's inputs."""
    values = [node.meta.get("example_value") for node in graph.nodes]
    return (
        all(node.op in ("call_function", "call_method") for node in nodes)
        and not any("grad_enabled" in str(node.target) for node in nodes)
        and not any(is_unbacked(value) for value in tree_leaves(values))
    )


def _region(whole: GraphModule, nodes: Sequence[Node]) -> Region:
    inside = set(nodes)
    read = [argument for node in nodes for argument in node.all_input_nodes]
    inputs = tuple(dict.fromkeys(node for node in read if node not in inside))
    outputs = tuple(node for node in nodes if not inside.issuperset(node.users))
    return Region(whole, tuple(nodes), inputs, outputs)
