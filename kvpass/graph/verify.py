"""Invariants of a graph between the stages."""

from __future__ import annotations

from torch.fx import Graph

from kvpass.errors import GraphError
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.packed_readers import is_packed
from kvpass.ops import logical
from kvpass.tensor.packed import PackedKV


def verify_rewritten(graph: Graph) -> None:
    """After the rules: well formed, and packed tensors are read by logical ops or returned.

    Raises:
        GraphError: if a rule left the graph broken.
    """
    graph.lint()
    for node in graph.nodes:
        if is_packed(node):
            for user in node.users:
                if user.target not in logical.LOGICAL and user.op != "output":
                    raise GraphError(f"{user.name} reads {node.name}, which is packed.")
        if (call := AppendCall.of(node)) is None:
            continue
        if call.rope is not None and (call.parsed.rope is not None or call.cos_sin is None):
            raise GraphError(f"{node.name} cannot rotate {call.new} before it is stored.")
        if (past := call.past) is not None:
            others = [u for u in past.users if AppendCall.of(u) is not None]
            if len(others) > 1:
                raise GraphError(f"{past} is appended to twice: {others}.")
            example = past.meta.get("example_value")
            if (getattr(example, "basis", None) is None) != (call.basis is None):
                raise GraphError(f"{node.name} appends channels in another order than the past's.")


def verify_bound(graph: Graph) -> None:
    """After binding and lowering: no logical op and no packed placeholder is left.

    Raises:
        GraphError: if one is.
    """
    graph.lint()
    for node in graph.nodes:
        if node.target in logical.LOGICAL:
            raise GraphError(f"{node.name} was not bound.")
        if node.op == "placeholder" and isinstance(node.meta.get("example_value"), PackedKV):
            raise GraphError(f"{node.name} still is a packed placeholder.")
