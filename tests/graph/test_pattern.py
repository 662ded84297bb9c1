"""The pattern language: spellings, captures, alternatives, and the miss that got furthest."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as nnf
from torch.fx import Graph, symbolic_trace

from kvpass.graph.pattern import (
    OPS,
    As,
    Capture,
    Chain,
    Is,
    Items,
    Link,
    Miss,
    argument,
    call,
    either,
    furthest,
    mutates,
    op_name,
)

NUMBER = Is(lambda value: isinstance(value, int | float), "a number")


def last(function):
    """The node that ``function`` returns, and its graph's nodes by name."""
    graph = symbolic_trace(function).graph
    return graph.output_node().args[0], {node.name: node for node in graph.nodes}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, y: x + y, "add"),
        (lambda x, y: torch.add(x, y), "add"),
        (lambda x, y: x.add(y), "add"),
        (lambda x, y: x.add_(y), "add"),
        (lambda x, y: x * y, "mul"),
        (lambda x, y: x / y, "div"),
        (lambda x, y: x @ y, "matmul"),
        (lambda x, y: torch.matmul(x, y), "matmul"),
        (lambda x, y: x.view(y), "reshape"),
        (lambda x, y: torch.concat([x, y]), "cat"),
        (lambda x, y: x.softmax(-1), "softmax"),
        (lambda x, y: nnf.softmax(x, dim=-1), "softmax"),
        (lambda x, y: x.type_as(y), "to"),
        (lambda x, y: x[:, None], "getitem"),
        (lambda x, y: nnf.scaled_dot_product_attention(x, y, y), "sdpa"),
        (lambda x, y: nnf.linear(x, y), "linear"),
        (lambda x, y: torch.tanh(x), "tanh"),
        (lambda x, y: torch.bmm(x, y), "matmul"),
        (lambda x, y: x.baddbmm(y, y), "baddbmm"),
        (lambda x, y: torch.maximum(x, y), "max"),
        (lambda x, y: x.masked_fill(y, 0), "masked_fill"),
        (lambda x, y: torch.where(x, y, 0), "where"),
        (lambda x, y: x.flatten(0, 1), "reshape"),
        (lambda x, y: x.swapaxes(0, 1), "transpose"),
        (lambda x, y: x.mT, "getattr"),
        (lambda x, y: x.type(torch.float32), "to"),
        (lambda x, y: x.erf(), "erf"),
    ],
)
def test_every_spelling_has_one_name(function, name):
    assert op_name(last(function)[0]) == name


def test_names_of_other_values():
    _, nodes = last(lambda x, y: x + y)
    assert op_name(nodes["x"]) == "placeholder"
    assert op_name(nodes["output"]) == "output"
    assert op_name(0.5) == "0.5"
    assert op_name(None) == "None"


def test_arguments_by_name_position_and_default():
    node, nodes = last(lambda x: nnf.scaled_dot_product_attention(x, x, value=x, dropout_p=0.1))
    assert argument(node, "query") is nodes["x"]
    assert argument(node, "value") is nodes["x"]
    assert argument(node, "dropout_p") == 0.1
    assert argument(node, "is_causal") is False
    assert argument(node, "attn_mask") is None
    assert argument(last(lambda x: torch.cat([x], -2))[0], "dim") == -2
    assert argument(last(lambda x: torch.cat([x], dim=1))[0], "dim") == 1
    assert argument(last(lambda x: torch.cat([x]))[0], "dim") == 0
    assert argument(last(lambda x: nnf.dropout(x))[0], "training") is True


def test_captures():
    node, nodes = last(lambda x, y: torch.matmul(x, y.transpose(2, 3)))
    pattern = call(
        "matmul",
        input=Capture("a"),
        other=call("transpose", input=Capture("b"), dim0=Capture("d", int)),
    )
    found = {}
    assert pattern.match(node, found) is None
    assert found == {"a": nodes["x"], "b": nodes["y"], "d": 2}


def test_capture_says_what_it_wanted():
    node, nodes = last(lambda x: x * 2)
    miss = call("mul", input=Capture("x"), other=Capture("factor")).match(node, {})
    assert miss == Miss("factor is 2, expected a tensor", node, 1)
    assert str(miss) == "factor is 2, expected a tensor (at mul)"
    miss = Capture("scale", lambda v: isinstance(v, float), "a number").match(nodes["x"], {})
    assert miss == Miss("scale is placeholder, expected a number", nodes["x"], 0)


@pytest.mark.parametrize("function", [lambda x, y: 2 * x, lambda x, y: x * 2])
def test_commutative_ops_match_both_ways(function):
    node, nodes = last(function)
    found = {}
    assert call("mul", input=Capture("x"), other=NUMBER).match(node, found) is None
    assert found == {"x": nodes["x"]}


def test_other_ops_match_one_way():
    pattern = call("div", input=Capture("x"), other=NUMBER)
    assert pattern.match(last(lambda x: x / 2)[0], {}) is None
    miss = pattern.match(last(lambda x: torch.div(2, x))[0], {})
    assert miss.reason == "x is 2, expected a tensor"


def test_a_failed_order_leaves_no_captures():
    node, _ = last(lambda x, y: torch.add(x.exp(), y))
    pattern = call("add", input=Capture("a"), other=call("mul", input=Capture("b")))
    found = {"kept": 1}
    assert isinstance(pattern.match(node, found), Miss)
    assert found == {"kept": 1}


def test_either_takes_the_first_and_keeps_the_furthest_miss():
    node, nodes = last(lambda x, y: torch.softmax(torch.tanh(x @ y) + y, -1))
    deep = call("softmax", input=call("add", input=call("matmul"), other=Capture("mask")))
    shallow = call("softmax", input=call("matmul"))
    for pattern in (either(deep, shallow), either(shallow, deep)):
        found = {}
        miss = pattern.match(node, found)
        assert found == {}
        assert miss == Miss("tanh, expected matmul", nodes["tanh"], 2)
    found = {}
    pattern = either(call("add", input=Capture("no")), call("softmax", input=Capture("yes")))
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
    miss = call("add", input=call("mul"), other=Capture("c")).match(node, {})
    assert (miss.node, miss.reason) in [(x, "placeholder, expected mul"), (node, "3, expected mul")]
    assert call("add").match(3, {}) == Miss("3, expected add", None, 0)


def test_defaults_name_parameters():
    for op in OPS.values():
        assert {name for name, _ in op.defaults} <= set(op.params)
        assert not op.commutative or op.params == ("input", "other")


SCALED = Chain(
    "steps",
    As("product", call("matmul", input=Capture("a"))),
    (
        Link("cast", lambda x: call("to", input=x)),
        Link("mul", lambda x: call("mul", input=x, other=Capture("by", int)), ("by",)),
        Link("add", lambda x: call("add", input=x, other=Capture("by")), ("by",)),
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
    both = call("cat", tensors=Items((Capture("a"), Capture("b"))))
    found = {}
    assert both.match(node, found) is None
    assert found == {"a": nodes["x"], "b": nodes["y"]}
    miss = call("cat", tensors=Items((Capture("a"),))).match(node, {})
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
    assert call(op, input=Capture("a")).match(node, {}) == Miss(name, node, 1)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.add_(1), True),
        (lambda x: torch.relu_(x), True),
        (lambda x: nnf.relu(x, inplace=True), True),
        (lambda x: torch.exp(x, out=x), True),
        (lambda x: x.add(1), False),
        (lambda x: nnf.relu(x), False),
    ],
)
def test_changes_in_place(function, expected):
    assert mutates(last(function)[0]) is expected


@pytest.mark.parametrize("target", [operator.iadd, operator.setitem, operator.imul])
def test_operators_that_change_in_place(target):
    graph = Graph()
    assert mutates(graph.call_function(target, (graph.placeholder("x"), 1)))
