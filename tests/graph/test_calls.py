"""Erasing what rewrites leave unread."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph

from kvpass.graph.calls import erase_unread
from kvpass.graph.logical_calls import AppendCall, PackedCall


def test_what_only_unread_nodes_had_read_is_erased():
    graph = Graph()
    x = graph.placeholder("x")
    shared = graph.call_method("cos", (x,))
    unread = graph.call_function(torch.neg, (graph.call_function(torch.add, (shared, 1)),))
    graph.output(shared)
    erase_unread(unread)
    assert [node.name for node in graph.nodes] == ["x", "cos", "output"]


def test_what_is_read_stays():
    graph = Graph()
    node = graph.call_method("cos", (graph.placeholder("x"),))
    graph.output(node)
    erase_unread(node)
    assert len(graph.nodes) == 3


def test_effects_stay():
    """Writes in place, unknown functions, and appends, which extend static caches."""

    def unknown(x):
        return x

    graph = Graph()
    x = graph.placeholder("x")
    append = AppendCall(x, x, "fp").insert(graph)
    packed = PackedCall(append).insert(graph)
    nodes = [graph.call_method("add_", (x, 1)), graph.call_function(unknown, (x,)), append]
    erase_unread(graph.call_function(torch.neg, (packed,)))
    for node in nodes:
        erase_unread(node)
        assert not node._erased


def test_writes_to_what_nothing_else_reads_have_no_effect():
    graph = Graph()
    product = graph.call_function(torch.matmul, (graph.placeholder("x"), 1))
    scaled = graph.call_function(operator.imul, (product, 2))
    erase_unread(graph.call_function(operator.iadd, (scaled, 3)))
    assert [node.name for node in graph.nodes] == ["x"]
    shared = graph.call_function(torch.matmul, (next(iter(graph.nodes)), 1))
    view = graph.call_method("view", (shared, -1))
    for node in (graph.call_method("zero_", (view,)), graph.call_method("mul_", (shared, 2))):
        erase_unread(node)
        assert not node._erased
