"""Arguments of bound graphs that are numbers."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from kvpass._torch_sizes import (
    defined_symbols,
    size_expr,
    symbolic_mode,
    symbolic_size,
    symbols_of,
)
from kvpass.graph.bind.sizes import drop_unread, number_arguments, size_arguments


@pytest.fixture
def same():
    """Two numbers that came in by themselves, and were found to be one: the first has its name."""
    mode = symbolic_mode()
    numbers = [symbolic_size(mode, name, 5) for name in ("a", "b")]
    with mode:
        tensors = [torch.empty(n) for n in numbers]
        torch.add(*tensors)
    (name,) = symbols_of(numbers[0])
    assert symbols_of(numbers[1]) == {name}
    numbers.sort(key=lambda n: defined_symbols(n) != {name})
    return mode, numbers


def graph_of(**examples):
    """A graph with these arguments, that returns the last one plus one."""
    graph = Graph()
    nodes = [graph.placeholder(name) for name in examples]
    for node, example in zip(nodes, examples.values(), strict=True):
        node.meta["example_value"] = example
    total = graph.call_function(torch.add, (nodes[-1], 1))
    total.meta["example_value"] = examples[nodes[-1].name] + 1
    graph.output((total,))
    return graph, nodes


def test_a_number_that_nobody_reads_is_dropped():
    mode = symbolic_mode()
    a, b = (symbolic_size(mode, name, 5) for name in ("a", "b"))
    with mode:
        x = torch.empty(a)
    graph, (first, second, _) = graph_of(a=a, b=b, x=x)
    positions = {first: 0, second: 1}
    # The size of a tensor is none of them.
    assert drop_unread(graph, positions, []) == {1}
    assert [n.name for n in graph.find_nodes(op="placeholder")] == ["a", "x"]


def test_a_number_by_whose_name_others_go_stays(same):
    _, (named, other) = same
    graph, (first, second) = graph_of(named=named, other=other)
    assert size_expr(graph.output_node().args[0][0].meta["example_value"]) == size_expr(named) + 1
    assert drop_unread(graph, {first: 0, second: 1}, []) == frozenset()


def test_a_size_that_no_argument_has_any_more_is_one(same):
    """That of a cache tensor, say, of which the graph gets the state."""
    mode, (named, other) = same
    with mode:
        cache = torch.empty(2, named)
    graph, _ = graph_of(other=other)
    assert size_arguments(graph, [other, cache]) == ((1, 1),)
    assert [n.name for n in graph.find_nodes(op="placeholder")] == ["other", "kvpass_size0"]
    # One that is there by its own name is not.
    graph, _ = graph_of(named=named)
    assert size_arguments(graph, [other, cache]) == ()


def test_numbers_that_are_added_to_integers_become_tensors():
    mode = symbolic_mode()
    n = symbolic_size(mode, "n", 5)
    with mode:
        positions, floats = torch.arange(3), torch.ones(3)

    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in ("n", "positions", "floats")}
    for name, example in (("n", n), ("positions", positions), ("floats", floats)):
        nodes[name].meta["example_value"] = example
    sums = [
        graph.call_function(torch.add, args)
        for args in (
            (nodes["positions"], nodes["n"]),
            (nodes["n"], nodes["positions"]),
            (nodes["floats"], nodes["n"]),
            (nodes["positions"], 2),
        )
    ]
    graph.output(tuple(sums))
    found = number_arguments(graph, {size_expr(n): 0})
    assert [(x.value([7]), x.device) for x in found] == [(7, torch.device("cpu"))]
    (*_, made) = graph.find_nodes(op="placeholder")
    example = made.meta["example_value"]
    assert (example.shape, example.dtype) == ((), torch.int64)
    names = [[getattr(x, "name", x) for x in node.args] for node in sums]
    assert names == [
        ["positions", "kvpass_number0"],
        ["positions", "kvpass_number0"],
        ["floats", "n"],
        ["positions", 2],
    ]
    # What is not among Dynamo's arguments stays where it is.
    assert number_arguments(graph, {}) == ()
