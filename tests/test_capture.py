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
from kvpass._torch import copy_module, copy_source, mark_static_input
from kvpass.errors import OptionError
from kvpass.runtime import PackedCallable
from tests.harness import run_steps
from tests.models import prompt, tiny_model

KIVI = recipe("kivi-2bit", group=16, residual=16)
# The graphs are looked at; who compiles them makes no difference.
OPTIONS = {"recipe": KIVI, "mode": "reduce-overhead", "inner": "eager"}


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
    kvpass = {"backend": "kvpass", "options": {"recipe": KIVI, "mode": "default"}}
    packed = static_inputs(model, DynamicCache(config=config), monkeypatch, **kvpass)
    assert len(packed) == 2
    assert all(len(names) > 9 for names in plain)
    assert packed == [plain[0]] * 2


def compiled(cache, family="llama", **steps):
    """The graphs of a prompt and three steps, in the mode that asks for CUDA graphs."""
    model = tiny_model(family, layers=2)
    model.compile(backend="kvpass", options=OPTIONS)
    room = {"max_cache_len": 64} if cache is StaticCache else {}
    with warnings.catch_warnings():
        # On a CPU the mode changes nothing.
        warnings.simplefilter("error")
        lengths, cache = [40, 1, 1, 1], cache(config=model.config, **room)
        run_steps(model, prompt(1, 43), lengths, cache=cache, **steps)
    return explain(model).graphs


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_a_step_is_the_same_graph_of_kernels_at_every_length(cache):
    """No argument is the length of the cache, or as long."""
    prefill, decode = compiled(cache)
    assert prefill.capture_obstacle == "it makes the cache, which a replay would overwrite"
    assert decode.capture_obstacle is None
    arguments = decode.bound.graph.find_nodes(op="placeholder")
    sizes = [n.name for n in arguments if isinstance(n.meta["example_value"], torch.SymInt)]
    assert sizes == ["kvpass_room"] * (cache is DynamicCache)
    state = [n for n in arguments if "segment_ends" in n.name or "codes" in n.name]
    assert len(state) == 8
    assert all("tensor_dict" in n.meta for n in state)


def test_a_number_says_what_room_there_is(monkeypatch):
    """CUDA graphs know tensors by their addresses, which another cache may get: it must not meet
    what was recorded for other room."""
    rooms = []
    real = PackedCallable._flat

    def watched(self, args, placed):
        flat = real(self, args, placed)
        if self.report.kind == "decode":
            rooms.append((flat[-1], *(args[p].rooms for p in self._binding.packed)))
        return flat

    monkeypatch.setattr(PackedCallable, "_flat", watched)
    model = tiny_model("llama", layers=1)
    model.compile(backend="kvpass", options=OPTIONS)
    for tokens in (40, 300, 40):
        cache = DynamicCache(config=model.config)
        run_steps(model, prompt(1, 343), [tokens, *[1] * 34], cache=cache)
    assert len(rooms) == 3 * 34
    numbers = {}
    for number, *room in rooms:
        assert numbers.setdefault(number, room) == room
    assert 2 <= len(numbers) <= 6
    assert sorted(numbers) == list(range(2, 2 + len(numbers)))


def test_a_mask_that_grows_is_an_obstacle():
    """That of padding, with a column for each token, where more than attention reads it."""
    mask = torch.ones(1, 43, dtype=torch.int64)
    mask[:, :3] = 0
    _, decode = compiled(DynamicCache, mask=mask)
    assert decode.capture_obstacle is None
    _, decode = compiled(DynamicCache, family="opt", mask=mask)
    assert decode.capture_obstacle == "its attention mask has a column for each token in the cache"


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
