"""In-place writes of a graph."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as nnf
from torch.fx import Graph, symbolic_trace

from kvpass.graph.analysis.effects import Writes, changed_storages, changes, mutates, written
from tests.graph.captured import Captured, function_of, inputs

WRITING = {
    "methods": "data.logical_not_()",
    "functions": "torch.relu_(past)",
    "assignments": "data.__setitem__(0, True)",
    "assignments to views": "data[0].__setitem__(0, True)",
    "out": "torch.add(past, 1, out=past)",
    "inplace": "torch.nn.functional.relu(past, inplace=True)",
    "inplace by place": "torch.nn.functional.dropout(past, 0.5, False, True)",
    "operators": "torch.ops.aten.add_.Tensor(past, 1)",
    "packets": "torch.ops.aten.mul_(past, 2)",
    "views": "past[0].view(-1).fill_(0)",
}
READING = {
    "bool operators": "(data & pad[:, None, None, :]) | data",
    "methods": "past.add(1).to(torch.float32).__neg__()",
    "not inplace": "torch.nn.functional.dropout(past, 0.5, False, False)",
    "operators": "torch.ops.aten.add.Tensor(past, 1)",
    "fresh memory": "past.clone().add_(1)",
}


@pytest.mark.parametrize("source", WRITING.values(), ids=WRITING)
def test_writes_are_found(source):
    captured = Captured(function_of(source, returns="q + 0, c + 0"))(*inputs(2, 3, 5))
    writes = Writes(captured.graph)
    found = [node for node in captured.graph.find_nodes(op="placeholder") if writes.to(node)]
    assert [node.name for node in found] == ["l_data_" if "data" in source else "l_past_"]


@pytest.mark.parametrize("source", READING.values(), ids=READING)
def test_reads_are_not_taken_for_writes(source):
    captured = Captured(function_of(returns=f"q + 0, {source}"))(*inputs(2, 3, 5))
    writes = Writes(captured.graph)
    assert not any(writes.to(node) for node in captured.graph.find_nodes(op="placeholder"))


def test_what_is_added_is_known():
    lines = ["c.add_(n)", "c.add_(past.shape[2])", "c.mul_(2)", "c.add_(1, alpha=2)"]
    captured = Captured(function_of(*lines, returns="q + 0, c + 0"), True)(*inputs(2, 3, 5))
    writes = Writes(captured.graph)
    (amounts,) = (
        [str(added) for _, added in writes.to(node)]
        for node in captured.graph.find_nodes(op="placeholder")
        if writes.to(node)
    )
    (q,) = (node for node in captured.graph.nodes if node.name == "l_q_")
    assert amounts[0] == str(q.meta["example_value"].shape[2])
    assert amounts[1] not in ("None", amounts[0])
    assert amounts[2:] == ["None", "None"]


def test_what_is_not_known_may_write_to_all():
    def unknown(x):
        return x

    graph = Graph()
    x = graph.placeholder("x")
    assert written(graph.call_function(unknown, (x,))) == [x]
    assert written(graph.call_module("inner", (x,))) == [x]
    assert written(graph.call_function(torch.ops.higher_order.cond, (True, None, None, (x,)))) == [
        x
    ]
    assert written(graph.call_function(nnf.softmax, (x, -1))) == []
    assert written(x) == []


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.add_(1), True),
        (lambda x: torch.relu_(x), True),
        (lambda x: nnf.relu(x, inplace=True), True),
        (lambda x: torch.exp(x, out=x), True),
        (lambda x: torch.dropout_(x, 0.5, True), True),
        (lambda x: nnf.dropout(x, 0.5, False, True), True),
        (lambda x: torch.ops.aten.add_.Tensor(x, 1), True),
        (lambda x: x.__iadd__(1), True),
        (lambda x: x.__invert__(), False),
        (lambda x: torch.exp(x, out=None), False),
        (lambda x: operator.and_(x, x), False),
        (lambda x: x.add(1), False),
        (lambda x: nnf.relu(x), False),
    ],
)
def test_changes_in_place(function, expected):
    (node,) = symbolic_trace(function).graph.output_node().all_input_nodes
    assert mutates(node) is expected


@pytest.mark.parametrize("target", [operator.iadd, operator.setitem, operator.imul])
def test_operators_that_change_in_place(target):
    graph = Graph()
    assert mutates(graph.call_function(target, (graph.placeholder("x"), 1)))
    assert not mutates(graph.call_function(operator.and_, (graph.placeholder("y"), 1)))


def test_what_is_written_to():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert written(graph.call_function(torch.add, (x, y), {"out": y})) == [y]
    assert written(graph.call_function(torch.add, (x, y), {"out": (x, y)})) == [x, y]
    assert written(graph.call_method("add_", (x, y))) == [x]
    assert written(graph.call_method("add_", (), {"input": x, "other": y})) == [x]
    assert written(graph.call_function(torch._foreach_add_, ([x, y], 1.0))) == [x, y]


def test_what_calls_unknown_code_is_not_certain_to_write():
    graph = Graph()
    x = graph.placeholder("x")
    for node in (
        graph.call_function(torch.ops.higher_order.flex_attention, (x,)),
        graph.call_module("inner", (x,)),
    ):
        assert written(node) == [x]
        assert written(node, unknown=False) == []
        assert not mutates(node)


def test_what_changes_a_tensor_or_a_view_of_it():
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    view = graph.call_method("transpose", (x, 0, 1))
    found = [graph.call_method("add_", (x, y)), graph.call_method("copy_", (view, y))]
    graph.call_method("copy_", (y, view))
    assert changes(x) == found


def test_memory_that_is_written_to():
    def function(x):
        y = x * 2
        view = y.view(-1)[2:]
        other = x + 1
        view.add_(1)
        return y.transpose(0, 1), other, view * 2

    captured = Captured(function)(torch.randn(3, 4))
    changed = changed_storages(captured.graph)
    transposed, other, fresh = captured.results
    assert transposed in changed
    assert transposed.args[0] in changed
    assert not {other, fresh, next(iter(captured.graph.nodes))} & changed


def test_memory_inside_vmap_is_that_of_the_whole():
    def function(x, y):
        x.add_(1)
        return torch.vmap(lambda row: row.view(-1) * 2)(x), torch.vmap(torch.neg)(y)

    captured = Captured(function)(torch.randn(3, 4), torch.randn(3, 4))
    x, y = captured.graph.find_nodes(op="placeholder")
    changed = changed_storages(captured.graph)
    nodes = captured.graph.nodes
    batched = {node.args[0]: node for node in nodes if "add_batch" in str(node.target)}
    view = next(node for node in batched[x].users if node.target == "view")
    assert {x, batched[x], view} <= changed
    assert not {y, batched[y], *batched[y].users} & changed
