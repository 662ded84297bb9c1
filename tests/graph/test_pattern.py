"""The pattern language: captures, alternatives, and the miss that got furthest."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, symbolic_trace

from kvpass.graph.pattern import As, Call, Capture, Chain, Either, Is, Items, Link, Miss, furthest

NUMBER = Is(lambda value: isinstance(value, int | float), "a number")


def last(function):
    """The node that ``function`` returns, and its graph's nodes by name."""
    graph = symbolic_trace(function).graph
    return graph.output_node().args[0], {node.name: node for node in graph.nodes}


def test_captures():
    node, nodes = last(lambda x, y: torch.matmul(x, y.transpose(2, 3)))
    pattern = Call(
        "matmul",
        input=Capture("a"),
        other=Call("transpose", input=Capture("b"), dim0=Capture("d", int)),
    )
    found = {}
    assert pattern.match(node, found) is None
    assert found == {"a": nodes["x"], "b": nodes["y"], "d": 2}


def test_capture_says_what_it_wanted():
    node, nodes = last(lambda x: x * 2)
    miss = Call("mul", input=Capture("x"), other=Capture("factor")).match(node, {})
    assert miss == Miss("factor is 2, expected a tensor", node, 1)
    assert str(miss) == "factor is 2, expected a tensor (at mul)"
    miss = Capture("scale", lambda v: isinstance(v, float), "a number").match(nodes["x"], {})
    assert miss == Miss("scale is placeholder, expected a number", nodes["x"], 0)


@pytest.mark.parametrize("function", [lambda x, y: 2 * x, lambda x, y: x * 2])
def test_commutative_ops_match_both_ways(function):
    node, nodes = last(function)
    found = {}
    assert Call("mul", input=Capture("x"), other=NUMBER).match(node, found) is None
    assert found == {"x": nodes["x"]}


def test_other_ops_match_one_way():
    pattern = Call("div", input=Capture("x"), other=NUMBER)
    assert pattern.match(last(lambda x: x / 2)[0], {}) is None
    miss = pattern.match(last(lambda x: torch.div(2, x))[0], {})
    assert miss.reason == "x is 2, expected a tensor"


def test_a_failed_order_leaves_no_captures():
    node, _ = last(lambda x, y: torch.add(x.exp(), y))
    pattern = Call("add", input=Capture("a"), other=Call("mul", input=Capture("b")))
    found = {"kept": 1}
    assert isinstance(pattern.match(node, found), Miss)
    assert found == {"kept": 1}


def test_either_takes_the_first_and_keeps_the_furthest_miss():
    node, nodes = last(lambda x, y: torch.softmax(torch.tanh(x @ y) + y, -1))
    deep = Call("softmax", input=Call("add", input=Call("matmul"), other=Capture("mask")))
    shallow = Call("softmax", input=Call("matmul"))
    for pattern in (Either(deep, shallow), Either(shallow, deep)):
        found = {}
        miss = pattern.match(node, found)
        assert found == {}
        assert miss == Miss("tanh, expected matmul", nodes["tanh"], 2)
    found = {}
    pattern = Either(Call("add", input=Capture("no")), Call("softmax", input=Capture("yes")))
    assert pattern.match(node, found) is None
    assert found == {"yes": nodes["add"]}


def test_the_first_of_equally_far_misses():
    first, second = Miss("a", None, 3), Miss("b", None, 3)
    assert furthest([Miss("c", None, 1), first, second]) is first
    assert str(first) == "a"


def test_a_value_where_a_call_was_wanted_is_missed_at_its_reader():
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.add, (x, 3))
    miss = Call("add", input=Call("mul"), other=Capture("c")).match(node, {})
    assert (miss.node, miss.reason) in [(x, "placeholder, expected mul"), (node, "3, expected mul")]
    assert Call("add").match(3, {}) == Miss("3, expected add", None, 0)


SCALED = Chain(
    "steps",
    As("product", Call("matmul", input=Capture("a"))),
    (
        Link("cast", lambda x: Call("to", input=x)),
        Link("mul", lambda x: Call("mul", input=x, other=Capture("by", int)), ("by",)),
        Link("add", lambda x: Call("add", input=x, other=Capture("by")), ("by",)),
    ),
)


def test_a_chain_remembers_its_steps_from_the_end_outwards():
    node, nodes = last(lambda x, y: (y + (x @ y) * 2).float() * 3)
    found = {}
    assert SCALED.match(node, found) is None
    assert found["a"] is nodes["x"]
    assert found["product"] is nodes["matmul"]
    steps = [(step.name, step.found.get("by")) for step in found["steps"]]
    assert steps == [("mul", 2), ("add", nodes["y"]), ("cast", None), ("mul", 3)]
    assert [step.node for step in found["steps"]][-1] is node
    assert found.keys() == {"a", "product", "steps"}


def test_a_chain_of_its_end_alone():
    found = {}
    assert SCALED.match(last(lambda x, y: x @ y)[0], found) is None
    assert found["steps"] == ()


def test_a_chain_misses_where_it_got_furthest():
    node, nodes = last(lambda x, y: (x.sin() * 2 + y).float())
    found = {}
    miss = SCALED.match(node, found)
    assert found == {}
    assert miss == Miss("sin, expected matmul", nodes["sin"], 3)


def test_items():
    node, nodes = last(lambda x, y: torch.cat([x, y], -1))
    both = Call("cat", tensors=Items((Capture("a"), Capture("b"))))
    found = {}
    assert both.match(node, found) is None
    assert found == {"a": nodes["x"], "b": nodes["y"]}
    miss = Call("cat", tensors=Items((Capture("a"),))).match(node, {})
    assert miss == Miss("[x, y], expected 1 items", node, 1)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, y: torch.add(x, y, alpha=2), "add with alpha"),
        (lambda x, y: torch.div(x, y, rounding_mode="floor"), "div with rounding_mode"),
    ],
)
def test_keywords_that_make_another_operation(function, name):
    node, _ = last(function)
    op = name.split()[0]
    assert Call(op, input=Capture("a")).match(node, {}) == Miss(name, node, 1)
