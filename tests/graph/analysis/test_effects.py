"""In-place writes of a graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from torch.fx import Graph

from kvpass.graph.writes import Writes, written
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
    def stranger(x):
        return x

    graph = Graph()
    x = graph.placeholder("x")
    assert written(graph.call_function(stranger, (x,))) == [x]
    assert written(graph.call_module("inner", (x,))) == [x]
    assert written(graph.call_function(torch.ops.higher_order.cond, (True, None, None, (x,)))) == [
        x
    ]
    assert written(graph.call_function(nnf.softmax, (x, -1))) == []
    assert written(x) == []
