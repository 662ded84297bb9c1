"""What `verify_rewritten` and `verify_bound` refuse."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from kvpass.errors import GraphError
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.verify import verify_bound, verify_rewritten
from kvpass.ops import logical
from tests.strategies import randn

PLAN = "int2.channel8/window=0,pack_every=16"


def graph_of(*appends: int) -> Graph:
    """Appends to one of two caches each."""
    graph = Graph()
    pasts, new = [graph.placeholder("a"), graph.placeholder("b")], graph.placeholder("new")
    graph.output(tuple(AppendCall(pasts[i], new, PLAN).insert(graph) for i in appends))
    return graph


def test_appending_twice_to_one_tensor():
    verify_rewritten(graph_of(0, 1))
    with pytest.raises(GraphError, match="a is appended to twice"):
        verify_rewritten(graph_of(0, 0))


def test_logical_ops_are_bound():
    with pytest.raises(GraphError, match="append was not bound"):
        verify_bound(graph_of(0))


def test_packed_placeholders_are_bound():
    graph = Graph()
    past = graph.placeholder("past")
    past.meta["example_value"] = logical.append(None, randn(1, 1, 5, 16), PLAN)
    graph.output((past,))
    with pytest.raises(GraphError, match="past still is a packed placeholder"):
        verify_bound(graph)
    past.meta["example_value"] = torch.zeros(2)
    verify_bound(graph)
