"""What CUDA graphs need of a compiled graph, seen on a CPU: static inputs, and reasons why not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch._functorch import aot_autograd
from torch.fx import Graph, GraphModule
from transformers import DynamicCache, StaticCache

from kvpass import explain, recipe
from kvpass._torch import copy_source, mark_static_input
from kvpass.backend import copy_module
from kvpass.errors import OptionError
from tests.harness import run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", group=16, residual=16)


def static_inputs(model: Any, cache: Any, monkeypatch: Any, **compiled: Any) -> list[set[str]]:
    """The sources of each graph's static inputs, after a prompt and two steps."""
    found = []
    real = aot_autograd._try_get_metadata_from_dynamo

    def watched(*args: Any) -> Any:
        sources, static = real(*args)
        names = [] if sources is None else [s.name if s else "" for s in sources]
        names = [name() if callable(name) else name for name in names]
        found.append({names[i] for i in static})
        return sources, static

    torch._dynamo.reset()
    monkeypatch.setattr(aot_autograd, "_try_get_metadata_from_dynamo", watched)
    twin = copy.deepcopy(model)
    twin.compile(**compiled)
    run_steps(twin, prompt(1, 42), [40, 1, 1], cache=cache)
    monkeypatch.undo()
    return found


def test_weights_are_static_inputs_as_for_plain_inductor(monkeypatch):
    """Others are checked at each call, and copied at each replay."""
    model = tiny_model("llama", layers=1)
    config = model.config
    plain = static_inputs(model, DynamicCache(config=config), monkeypatch, backend="inductor")
    kvpass = {"backend": "kvpass", "options": {"recipe": KIVI}}
    packed = static_inputs(model, DynamicCache(config=config), monkeypatch, **kvpass)
    assert len(packed) == 2
    assert all(len(names) > 9 for names in plain)
    assert packed == [plain[0]] * 2


@pytest.mark.parametrize(
    ("cache", "obstacle"),
    [(DynamicCache, "its cache grows"), (StaticCache, None)],
)
def test_a_step_says_why_cuda_graphs_cannot_replay_it(cache, obstacle):
    model = tiny_model("llama", layers=1)
    model.compile(backend="kvpass", options={"recipe": KIVI, "mode": "reduce-overhead"})
    room = {"max_cache_len": 64} if cache is StaticCache else {}
    with warnings.catch_warnings():
        # On a CPU the mode changes nothing.
        warnings.simplefilter("error")
        run_steps(model, prompt(1, 41), [40, 1], cache=cache(config=model.config, **room))
    prefill, decode = explain(model).graphs
    assert prefill.capture_obstacle == "it makes the cache, which a replay would overwrite"
    found = decode.capture_obstacle
    assert found is obstacle or found.startswith(obstacle)


def test_an_unknown_mode():
    model = tiny_model("llama", layers=1)
    model.compile(backend="kvpass", options={"mode": "reduce-overheads"})
    with pytest.raises(OptionError, match=r"Unknown mode 'reduce-overheads'. Did you mean 'reduce"):
        model(prompt(1, 4))


def test_copies_keep_what_a_node_is_marked_with():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(2)
    mark_static_input(x)
    graph.output((x,))
    copied = copy_module(GraphModule({}, graph))
    (node,) = copied.graph.find_nodes(op="placeholder")
    copy_source(x, node)
    assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}
