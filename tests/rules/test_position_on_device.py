"""Positions behind a growing cache, read on the device."""

from __future__ import annotations

import pytest
import torch

from kvpass import explain
from kvpass.graph.spellings import op_name
from tests.harness import run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_FP32

OPTIONS = {"recipe": "fp", "mode": "reduce-overhead"}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_logits_equal_eager(inner):
    """Steps of one token and of several, and one prompt behind another."""
    model, ids = tiny_model("llama", layers=1), prompt(1, 66)
    # Inductor takes a while for each kind of step.
    steps = [30, 1, 1, 1] if inner == "inductor" else [30, 1, 3, 30, 1, 1]
    wanted, _ = run_steps(model, ids[:, : sum(steps)], steps)
    model.compile(backend="kvpass", options={**OPTIONS, "inner": inner})
    got, _ = run_steps(model, ids[:, : sum(steps)], steps)
    assert (got - wanted).abs().max().item() <= LOGITS_FP32
    *_, decode = explain(model).graphs
    events = [e for e in decode.events if e.rule == "position_on_device"]
    assert events
    assert all(event.fired for event in events)
    targets = [node.target for node in decode.bound.graph.nodes]
    assert targets.count(torch.ops.kvpass.length.default) == 1


def test_a_window_that_slides_counts_otherwise():
    """What it holds is not where its next token stands; how many have come is a number of the host,
    which the graph gets as a tensor."""
    model = tiny_model("mistral", layers=1, sliding_window=16)
    ids = prompt(1, 24)
    wanted, _ = run_steps(model, ids, [20, 1, 1, 1, 1])
    model.compile(backend="kvpass", options={**OPTIONS, "inner": "eager"})
    got, _ = run_steps(model, ids, [20, 1, 1, 1, 1])
    assert (got - wanted).abs().max().item() <= LOGITS_FP32
    events = [e for g in explain(model).graphs for e in g.events]
    assert not any(e.rule == "position_on_device" for e in events)
    *_, decode = explain(model).graphs
    arguments = {n.name: n for n in decode.bound.graph.find_nodes(op="placeholder")}
    sizes = [k for k, n in arguments.items() if isinstance(n.meta["example_value"], torch.SymInt)]
    assert sizes == ["kvpass_room"]
    (user,) = arguments["kvpass_number0"].users
    assert op_name(user) == "add"
    # The host counts on, outside of the graph.
    *_, outputs = decode.bound.graph.nodes
    assert all(isinstance(n.meta["example_value"], torch.Tensor) for n in outputs.args[0])


def test_without_cuda_graphs_it_stays_a_number_of_the_host():
    model = tiny_model("llama", layers=1)
    model.compile(backend="kvpass", options={"recipe": "fp", "inner": "eager"})
    run_steps(model, prompt(1, 24), [20, 1, 1])
    *_, decode = explain(model).graphs
    assert not any(e.rule == "position_on_device" for e in decode.events)
