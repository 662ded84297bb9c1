"""Layers that are alike are compiled once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import kvpass
from kvpass import explain, recipe
from kvpass._torch_inductor import Compile, inductor
from kvpass._torch_sizes import Numbering, symbolic_mode, symbolic_size
from kvpass.regional import compile_regions
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model
from tests.tolerances import LOGITS_CODE_FLIP


class Layer(nn.Module):
    """One of a few things that layers do with what they get, and with what they keep."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(5 if kind == "reads five" else 4))
        self.register_buffer("seen", self.kept[:] if kind == "reads twice" else torch.zeros(4))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "writes":
            self.kept.add_(x.sum(0))
            state.add_(self.kept)
            x = x + self.kept
        elif self.kind == "counts":
            x = x * x.size(0)
        elif self.kind.startswith("reads"):
            self.kept.add_(1)
            x = x + self.kept[:4] + self.seen
        if self.kind == "few tokens":
            weight, bias = self.linear.weight, self.linear.bias
            y = torch.ops.kvpass.linear.default(x.tanh(), weight, bias)
        else:
            y = self.linear(x.tanh())
        if self.kind == "views":
            return y.t().t(), state[:]
        if self.kind == "passes":
            state = state.float()
            state.add_(1)
        return x + y, state * 2 if self.kind == "counts" else state


class Layers(nn.Module):
    def __init__(self, kinds: list[str], shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Layer, kinds))
        if shared:
            for layer in self.layers:
                layer.kept = self.layers[0].kept

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        for layer in self.layers:
            x, state = layer(x, state)
        return x.sum(0), state, x.size(0), x


@contextmanager
def uncompiled() -> Iterator[Compile]:
    yield lambda graph, _: graph


def cut(
    model: Callable[..., Any], inner: AbstractContextManager[Compile] | None = None, **options: Any
) -> tuple[Callable[..., Any], list[tuple[int, int]]]:
    """``model`` in regions, each run as it is or compiled by ``inner``; how many of how many
    kinds."""
    found = []

    def backend(module: Any, examples: Any) -> Any:
        with inner or uncompiled() as compile_one:
            function, regions = compile_regions(module, examples, compile_one)
        found.append(regions)
        return function

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, **options), found


@settings(max_examples=15)
@given(
    st.lists(
        st.sampled_from(["plain", "writes", "counts", "views", "reads", "reads twice", "passes"]),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.booleans(),
)
def test_cuts_change_nothing(kinds: list[str], shared: bool, dynamic: bool) -> None:
    """Whatever is written to, read later or is the memory of something else."""
    with torch.no_grad():
        model, twin = Layers(kinds * 3, shared), Layers(kinds * 3, shared)
        function, _ = cut(twin, dynamic=dynamic)
        for length in (3, 3, 5):
            x = torch.randn(length, 4)
            states = torch.ones(4), torch.ones(4)
            wanted, got = model(x, states[0]), function(x, states[1])
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(states[1], states[0])
            torch.testing.assert_close(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("kinds", "regions"),
    [
        (["plain"] * 6, (7, 3)),
        (["writes"] * 6, (7, 3)),
        (["few tokens"] * 6, (7, 3)),
        (["passes"] * 6, (7, 3)),
        # Inputs of another size are other inputs.
        (["reads"] * 3 + ["reads five"] + ["reads"] * 3, (8, 4)),
        # Two inputs of a region share their memory.
        (["reads"] * 3 + ["reads twice"] + ["reads"] * 3, (1, 1)),
        (["plain", "counts"] * 4, (9, 4)),
        # Too few to gain by it.
        (["plain"] * 3, (1, 1)),
        (["plain", "counts", "writes", "plain"], (1, 1)),
    ],
)
def test_layers_that_are_alike_are_one_kind(kinds: list[str], regions: tuple[int, int]) -> None:
    with torch.no_grad():
        function, found = cut(Layers(kinds))
        function(torch.randn(3, 4), torch.ones(4))
    assert found == [regions]


def passes_views(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    seen = state[:2]
    for layer in model.layers:
        x, state = layer(x, state)
        x = x + seen.sum()
    return x


def passes_itself(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    same = state.float()
    for layer in model.layers:
        x, _ = layer(x, state)
        x = x + same.add_(1)
    return x


def test_what_is_written_in_one_region_is_seen_in_the_next() -> None:
    """Also where it is passed on, and Inductor compiles each."""
    model, x = Layers(["plain"] * 6), torch.randn(3, 4)
    states = torch.ones(4), torch.ones(4)
    with torch.no_grad():
        callee, found = cut(passes_itself, inductor(None, "regions"))
        got, wanted = callee(model, x, states[0]), passes_itself(model, x, states[1])
    torch.testing.assert_close(got, wanted)
    assert found == [(7, 3)]
    assert states[0].tolist() == states[1].tolist() == [7.0] * 4


def keeps_one(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    kept = state
    for number, layer in enumerate(model.layers):
        inner = x.tanh()
        x = x + layer.linear(inner)
        kept = inner if number == 3 else kept
    return x + kept


def test_what_is_read_later_makes_another_kind() -> None:
    model, x, state = Layers(["plain"] * 7), torch.randn(3, 4), torch.ones(4)
    with torch.no_grad():
        callee, found = cut(keeps_one)
        torch.testing.assert_close(callee(model, x, state), keeps_one(model, x, state))
    assert found == [(8, 4)]


def test_a_number_among_the_results_stays_there() -> None:
    found = []

    def backend(module: Any, examples: Any) -> Any:
        output = module.graph.output_node()
        output.args = ((*output.args[0], 7),)
        function, regions = compile_regions(module, examples, lambda graph, _: graph)

        def call(*args: Tensor) -> list[Tensor]:
            *results, number = function(*args)
            found.append((number, regions))
            return results

        return call

    model, x = Layers(["plain"] * 6), torch.randn(3, 4)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x, torch.ones(4))
        torch.testing.assert_close(got, model(x, torch.ones(4)))
    assert found == [(7, (7, 3))]


def passes_itself_beside(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    same = state.float()
    for layer in model.layers:
        x, _ = layer(x, state)
        x = x + same.add_(1) + state
    return x


def in_a_context(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x, state)[0]


def in_parallel(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    return torch.vmap(lambda one: model(one[None], state)[0])(x)


def with_gradients(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    with torch.enable_grad():
        return model(x, state)[0]


def depends_on_data(model: Layers, x: Tensor, state: Tensor) -> Tensor:
    return model(x, state)[0] + torch.nonzero(state).size(0)


@pytest.mark.parametrize(
    "function",
    [
        passes_views,
        passes_itself_beside,
        in_a_context,
        in_parallel,
        with_gradients,
        depends_on_data,
    ],
)
def test_what_cuts_could_change_is_not_cut(function: Callable[..., Tensor]) -> None:
    model = Layers(["plain"] * 6)
    x, state = torch.randn(3, 4), torch.ones(4)
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        callee, found = cut(function, fullgraph=True)
        wanted = function(model, x, state.clone())
        torch.testing.assert_close(callee(model, x, state), wanted)
    assert found == [(1, 1)]


def test_gradients_are_not_cut() -> None:
    model = Layers(["plain"] * 6)
    function, found = cut(model)
    function(torch.randn(3, 4), torch.ones(4))
    assert found == [(1, 1)]


def test_what_is_known_of_one_regions_sizes_is_asked_of_the_others() -> None:
    mode = symbolic_mode()
    sizes = [symbolic_size(mode, f"s{i}", example) for i, example in enumerate((8, 6, 8, 6, 8, 3))]
    numberings = []
    for first in (0, 2, 4):
        numbering = Numbering(mode)
        numbers = [numbering.number(sizes[i] * 2) for i in (first, first + 1, first)]
        assert numbers[0] == numbers[2] != numbers[1]
        numberings.append(numbering)
    first, like, unlike = numberings
    assert first.ranges() == like.ranges() == unlike.ranges()
    # As compiling the first region does.
    assert sizes[0] < 2 * sizes[1]
    assert first.holds_for(like)
    assert not first.holds_for(unlike)
    guarded = {str(guard.expr) for guard in mode.shape_env.guards}
    names = [str(size.node.expr) for size in sizes]
    for a, b in ((0, 1), (2, 3)):
        assert any(names[a] in text and names[b] in text for text in guarded)
    # A narrower range makes other code.
    assert sizes[2] > 4
    again = Numbering(mode)
    again.number(sizes[2])
    assert again.ranges()[0] != first.ranges()[0]


FOUR, TWO = (recipe(f"kivi-{bits}bit", group=8, residual=16) for bits in (4, 2))
STEPS = [40, *[1] * 24, 3, 1]


@pytest.mark.parametrize(
    ("family", "chosen", "kinds"), [("llama", "mixed", 4), ("mistral", "fp", 3)]
)
def test_a_models_layers_are_compiled_once(family: str, chosen: str, kinds: int) -> None:
    """One with a plan of its own, the first and what follows the last are other kinds. With a
    prompt and a cache that grows, or slides, the numbers are the oracle's."""
    model, ids = tiny_model(family, layers=6), prompt(1, sum(STEPS))
    plan = (recipe("fp") if chosen == "fp" else FOUR).plan(model.config)
    if chosen == "mixed":
        plan = replace(plan, layers={"3": TWO.plan(model.config).default})
    wanted, _ = run_steps(model, ids, STEPS, None, kvpass.oracle_cache(plan, model.config))
    twin = compiled(model, plan, inner="inductor")
    got, _ = run_steps(twin, ids, STEPS)
    assert (got - wanted).abs().max().item() <= LOGITS_CODE_FLIP
    assert {graph.regions for graph in explain(twin).graphs} == {(7, kinds)}
    assert f"in 7 regions of {kinds} kinds" in str(explain(twin))
