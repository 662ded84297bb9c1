"""Which tensors of a graph share memory that something changes in place."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, Node

from kvpass.graph.analysis.reads import VIEWS
from kvpass.graph.pattern import OPS, mutates, op_name

# Ops whose result shares no memory with what they read, unless they work in place.
FRESH = (OPS.keys() - VIEWS) | {"embedding", "layer_norm", "mean", "neg", "pow", "rsqrt", "stack"}


def changed_storages(graph: Graph) -> set[Node]:
    """Nodes that share memory, or may, with something that is changed in place."""
    changed = {n for n in graph.nodes if mutates(n)}
    frontier = set(changed)
    while frontier:
        near = {source for node in frontier for source in _may_share(node)}
        near |= {user for node in frontier for user in node.users if node in _may_share(user)}
        frontier = near - changed
        changed |= frontier
    return changed


def _may_share(node: Node) -> list[Node]:
    """The tensors that ``node`` reads and may be a view of."""
    if node.op == "output" or (op_name(node) in FRESH and not mutates(node)):
        return []
    sources = node.all_input_nodes
    # What a change in place only reads is not what it changes.
    sources = sources[:1] if mutates(node) else sources
    return [s for s in sources if isinstance(s.meta.get("example_value"), Tensor | tuple | list)]
