"""The identities by which permutations of channels move, each over random shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node, symbolic_trace
from torch.testing import assert_close

from kvpass.graph.bases import basis_of, changes_basis, composed, in_basis, inverse
from kvpass.graph.logical_calls import BasisCall, WeightBasisCall
from kvpass.graph.pattern import Miss
from kvpass.ops import logical
from kvpass.rules.basis.arithmetic import elementwise_down, elementwise_up, scaled_up
from kvpass.rules.basis.push_basis import DOWN, UP
from kvpass.rules.basis.rotary import keeps_halves, keeps_neighbours, rotary_up
from kvpass.rules.basis.views import (
    cat_up,
    compose_up,
    reshape_down,
    reshape_up,
    slice_up,
    transpose_down,
    transpose_up,
    unmoved,
)
from kvpass.rules.basis.weights import linear_down, linear_up
from tests.bases import free, paired
from tests.strategies import SEEDS, randn

SMALL = st.integers(1, 4)
PAIRS = st.integers(1, 5)
# Sums of a few products of normal numbers, in another order.
ATOL = 1e-5


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heads_index(heads: int, dim: int, seed: int) -> Tensor:
    """A permutation of the channels of each head of ``[B, H, n, D]``."""
    return free(heads, dim, rng(seed))[None, :, None]


def weight(*shape: int, seed: int = 9) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(*shape, seed=seed), requires_grad=False)


def traced(function: Callable[..., Any], args: tuple[Any, ...]) -> GraphModule:
    """The graph of ``function``, with the values of all its nodes."""
    module = symbolic_trace(function)

    class Keeping(Interpreter):
        def run_node(self, n: Node) -> Any:
            n.meta["example_value"] = result = super().run_node(n)
            return result

    Keeping(module).run(*args)
    return module


def result(module: GraphModule, args: tuple[Any, ...]) -> Any:
    module.graph.lint()
    module.recompile()
    return module(*args)


def lifted(function: Callable[..., Any], args: tuple[Any, ...], index: Tensor, push: Any) -> Any:
    """Checks ``P(function(...))`` before and after ``push``; returns the graph, or a `Miss`."""
    module = traced(function, args)
    (x,) = module.graph.output_node().all_input_nodes
    permute = in_basis(x, index)
    if permute is x:
        return module
    x.replace_all_uses_with(permute, lambda user: user is not permute)
    before = result(module, args)
    moved = push(x, index)
    if not isinstance(moved, list):
        assert_close(result(module, args), before, rtol=0, atol=0)
        return moved
    permute.replace_all_uses_with(x)
    module.graph.erase_node(permute)
    assert_close(result(module, args), before, rtol=0, atol=ATOL)
    return module


def lowered(function: Callable[..., Any], args: tuple[Any, ...], index: Tensor, push: Any) -> Any:
    """Checks ``function(P(x), ...)`` before and after ``push``; returns the graph, or a `Miss`."""
    module = traced(function, args)
    x = next(iter(module.graph.nodes))
    permute = in_basis(x, index, "down")
    if permute is x:
        return module
    x.replace_all_uses_with(permute, lambda user: user is not permute)
    before = result(module, args)
    (reader,) = permute.users
    moved = push(reader, permute, index)
    if not isinstance(moved, list):
        return moved
    module.graph.erase_node(permute)
    assert_close(result(module, args), before, rtol=0, atol=ATOL)
    return module


def permutations(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if changes_basis(node)]


def folds(module: GraphModule) -> list[str]:
    nodes = module.graph.find_nodes(op="call_function", target=logical.rotate_weight)
    return sorted(WeightBasisCall.at(node).weight.name for node in nodes)


@given(SMALL, SMALL, SEEDS)
def test_arithmetic_of_indices(heads, dim, seed):
    x = randn(2, heads, 3, dim)
    first, second = heads_index(heads, dim, seed), heads_index(heads, dim, seed + 1)
    once = logical.rotate_channels(x, first)
    twice = logical.rotate_channels(once, second)
    assert_close(logical.rotate_channels(x, composed(first, second)), twice, rtol=0, atol=0)
    assert_close(logical.rotate_channels(once, inverse(first)), x, rtol=0, atol=0)


@given(SMALL, SMALL, SEEDS)
def test_compose(heads, dim, seed):
    x, first = randn(2, heads, 3, dim), heads_index(heads, dim, seed)
    module = traced(lambda x: x + 0, (x,))
    (source,) = module.graph.output_node().all_input_nodes
    inner = in_basis(source, first)
    if inner is source:
        return
    for second in (heads_index(heads, dim, seed + 1), inverse(first)):
        wanted = logical.rotate_channels(logical.rotate_channels(x, basis_of(inner)), second)
        assert compose_up(inner, second) == [inner]
        assert_close(logical.rotate_channels(x, basis_of(inner)), wanted, rtol=0, atol=0)


@given(SMALL, SMALL, SMALL, SEEDS, st.sampled_from(["transpose", "permute"]))
def test_transpose(n, heads, dim, seed, name):
    args = (1, 2) if name == "transpose" else (0, 2, 1, 3)
    x, index = randn(2, n, heads, dim), heads_index(heads, dim, seed)
    move = lambda x: getattr(x, name)(*args)  # noqa: E731
    assert isinstance(lifted(move, (x,), index, transpose_up), GraphModule)
    assert isinstance(lowered(move, (x.transpose(1, 2),), index, transpose_down), GraphModule)


def test_transposed_channels_are_refused():
    index = heads_index(2, 3, 1)
    found = lifted(lambda x: x.transpose(2, 3), (randn(1, 2, 3, 4),), index[..., :3], transpose_up)
    assert isinstance(found, Miss)
    assert str(found) == "the channels are transposed (at transpose)"


@given(SMALL, SMALL, SMALL, SEEDS)
def test_reshape(n, heads, dim, seed):
    index = free(heads, dim, rng(seed))[None, None]
    split = lifted(
        lambda x: x.view(2, n, heads, dim), (randn(2, n, heads * dim),), index, reshape_up
    )
    joined = lowered(lambda x: x.reshape(2, n, -1), (randn(2, n, heads, dim),), index, reshape_down)
    assert isinstance(split, GraphModule)
    assert isinstance(joined, GraphModule)
    flat = free(1, dim, rng(seed))
    same = lifted(lambda x: x.view(-1, dim), (randn(2, n, dim),), flat, reshape_up)
    assert isinstance(same, GraphModule)


def test_reshape_that_mixes_heads_is_refused():
    found = lifted(lambda x: x.reshape(6, 4), (randn(2, 3, 4),), free(6, 4, rng(0)), reshape_up)
    assert str(found) == "the view does more than split the channels into heads (at reshape)"


@given(SMALL, st.integers(1, 3), SEEDS, st.sampled_from(["slice", "chunk", "split"]))
def test_slice(dim, which, seed, name):
    """Of three runs of channels, one is permuted; the others are read as they were."""
    index = free(1, dim, rng(seed))[None]
    x, start = randn(2, 3, 3 * dim), (which - 1) * dim

    def parts(x):
        if name == "slice":
            found = [x[..., i * dim : (i + 1) * dim] for i in range(3)]
        else:
            cut = x.chunk(3, dim=-1) if name == "chunk" else x.split(dim, dim=2)
            found = [cut[i] for i in range(3)]
        return found[which - 1], sum(found[i] * i for i in range(3) if i != which - 1)

    module = traced(parts, (x,))
    chosen, _ = module.graph.output_node().args[0]
    permute = in_basis(chosen, index)
    if permute is chosen:
        return
    chosen.replace_all_uses_with(permute, lambda user: user is not permute)
    before = result(module, (x,))
    (moved,) = slice_up(chosen, index)
    permute.replace_all_uses_with(chosen)
    module.graph.erase_node(permute)
    assert_close(result(module, (x,)), before, rtol=0, atol=0)
    assert permutations(module) == [moved]
    assert basis_of(moved)[..., start : start + dim].equal(index + start)


@given(SMALL, SMALL, SMALL, SMALL, SEEDS)
def test_cat(heads, first, second, n, seed):
    parts = [heads_index(heads, dim, seed + dim) for dim in (first, second)]
    x, y = randn(2, heads, n, first), randn(2, heads, n, second, seed=1)
    index = torch.cat([parts[0], parts[1] + first], dim=-1)
    join = lambda x, y: torch.cat([x, y], dim=-1)  # noqa: E731
    assert isinstance(lifted(join, (x, y), index, cat_up), GraphModule)
    z = randn(2, heads, 3, first, seed=2)
    tokens = lambda x, z: torch.cat((x, z), dim=-2)  # noqa: E731
    assert isinstance(lifted(tokens, (x, z), parts[0], cat_up), GraphModule)


def test_cat_of_mixed_channels_is_refused():
    index = torch.tensor([[[[0, 2, 1, 3]]]])
    x = randn(1, 1, 1, 2)
    found = lifted(lambda x, y: torch.cat([x, y], dim=-1), (x, x), index, cat_up)
    assert str(found) == "it mixes channels that are joined (at cat)"


ELEMENTWISE = {
    "cast": lambda x: x.to(torch.float64),
    "float": lambda x: x.float(),
    "scale": lambda x: x * 0.5,
    "scale from the left": lambda x: 0.5 * x,
    "shift": lambda x: x - 1,
    "divide": lambda x: x / 3,
    "neg": lambda x: -x,
    "contiguous": lambda x: x.contiguous(),
    "dropout": lambda x: nnf.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("function", ELEMENTWISE.values(), ids=ELEMENTWISE)
@given(SMALL, SMALL, SEEDS)
def test_elementwise(function, heads, dim, seed):
    args, index = (randn(2, heads, 3, dim),), heads_index(heads, dim, seed)
    assert isinstance(lifted(function, args, index, elementwise_up), GraphModule)
    assert isinstance(lowered(function, args, index, elementwise_down), GraphModule)


def test_dropout_that_drops_is_refused():
    module = traced(lambda x: nnf.dropout(x, 0.5), (randn(1, 2, 3, 4),))
    (dropout,) = module.graph.output_node().all_input_nodes
    found = elementwise_up(dropout, heads_index(2, 4, 0))
    assert str(found) == "dropout chooses channels (at dropout)"


def norm(x: Tensor, w: Tensor, form: str) -> Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled * (1.0 + w.float()) if form == "gemma" else w * scaled


@pytest.mark.parametrize("form", ["llama", "gemma"])
@given(SMALL, st.integers(2, 5), SMALL, SEEDS)
def test_scaled_by_a_norm(form, heads, dim, n, seed):
    """Both factors of a norm: one per channel, a parameter, and one per head and token."""
    args = (randn(2, heads, n, dim), weight(dim))
    index = heads_index(heads, dim, seed)
    module = lifted(lambda x, w: norm(x, w, form), args, index, scaled_up)
    assert isinstance(module, GraphModule)
    if not permutations(module):
        return
    assert folds(module) == ["w"]
    (permute,) = permutations(module)
    (scaled,) = permute.all_input_nodes[:1]
    before = result(module, args)
    moved = scaled_up(scaled, basis_of(permute))
    permute.replace_all_uses_with(scaled)
    module.graph.erase_node(permute)
    assert_close(result(module, args), before, rtol=0, atol=ATOL)
    (inner,) = moved
    (square,) = (n for n in module.graph.nodes if n.target == "pow")
    assert unmoved(square, basis_of(inner))


@given(SMALL, st.integers(2, 5), SEEDS)
def test_sums_of_squares_have_no_order(heads, dim, seed):
    x, index = randn(2, heads, 3, dim), heads_index(heads, dim, seed)
    moved = logical.rotate_channels(x, index)
    wanted = x.pow(2).mean(-1, keepdim=True)
    assert_close(moved.pow(2).mean(-1, keepdim=True), wanted, rtol=0, atol=ATOL)


@pytest.mark.parametrize("by", ["tensor", "itself", "buffer", "matrix"])
def test_other_factors_are_refused(by):
    x, other = randn(1, 2, 3, 4), randn(1, 2, 3, 4, seed=1)
    functions = {
        "tensor": (lambda x, y: x * y, (x, other)),
        "itself": (lambda x: x * x, (x,)),
        "buffer": (lambda x, y: x * y, (x, randn(4))),
        "matrix": (lambda x, y: x * y, (x, weight(3, 4))),
    }
    found = lifted(*functions[by], heads_index(2, 4, 1), scaled_up)
    assert isinstance(found, Miss)


def half_split(half: int) -> Callable[..., Tensor]:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    return rotate


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2) * sin


@pytest.mark.parametrize("neighbours", [False, True], ids=["half_split", "interleaved"])
@given(SMALL, PAIRS, SMALL, SEEDS)
def test_rotary(neighbours, heads, pairs, n, seed):
    x = randn(2, heads, n, 2 * pairs)
    cos, sin = (randn(2, 1, n, 2 * pairs, seed=s) for s in (1, 2))
    index = paired(heads, 2 * pairs, rng(seed), 2 * pairs, neighbours)[None, :, None]
    function = interleaved if neighbours else half_split(pairs)
    module = lifted(function, (x, cos, sin), index, rotary_up)
    assert isinstance(module, GraphModule)
    sources = {BasisCall.at(node).x.name for node in permutations(module)}
    assert sources in (set(), {"x", "cos", "sin"})


@given(st.integers(2, 5), SEEDS)
def test_orders_that_break_pairs_are_refused(pairs, seed):
    index = heads_index(2, 2 * pairs, seed)
    args = tuple(randn(1, h, 2, 2 * pairs, seed=h) for h in (2, 1, 1))
    for function, keeps in ((half_split(pairs), keeps_halves), (interleaved, keeps_neighbours)):
        if not keeps(index):
            found = lifted(function, args, index, rotary_up)
            assert isinstance(found, Miss)
            assert found.reason == "the order does not keep the pairs of the rotary embedding"


def test_a_rotation_that_is_read_elsewhere_is_refused():
    index = torch.tensor([[[[1, 0, 3, 2]]]])
    args = tuple(randn(1, 1, 2, 4, seed=s) for s in range(3))
    module = traced(lambda x, c, s: (half_split(2)(x, c, s), x[..., :2]), args)
    rotated, piece = module.graph.output_node().args[0]
    negated = next(n for n in module.graph.nodes if n.name == "neg")
    module.graph.output_node().args = ((rotated, negated),)
    assert piece.name.startswith("getitem")
    found = rotary_up(rotated, index)
    assert found.reason == "neg is read by output as well"


@pytest.mark.parametrize("bias", [False, True])
@given(SMALL, SMALL, SMALL, SEEDS)
def test_linear(bias, inner, heads, dim, seed):
    c = heads * dim
    index = free(1, c, rng(seed))[None]
    cases = ((lifted, linear_up, c, inner), (lowered, linear_down, inner, c))
    for check, push, rows, columns in cases:
        args = (randn(2, 3, columns), weight(rows, columns), *[weight(rows)] * bias)
        function = (lambda x, w, b: nnf.linear(x, w, b)) if bias else lambda x, w: nnf.linear(x, w)
        module = check(function, args, index, push)
        assert isinstance(module, GraphModule)
        assert permutations(module) == []
        names = ["b", "w"] if bias and check is lifted else ["w"]
        assert folds(module) in ([], names)


@given(SMALL, SMALL, SMALL, SEEDS)
def test_addmm(inner, heads, dim, seed):
    c = heads * dim
    index = free(1, c, rng(seed))
    up = lifted(
        lambda x, w, b: torch.addmm(b, x, w), (randn(3, inner), weight(inner, c), weight(c)),
        index, linear_up,
    )  # fmt: skip
    down = lowered(
        lambda x, w, b: torch.addmm(b, x, w), (randn(3, c), weight(c, inner), weight(inner)),
        index, linear_down,
    )  # fmt: skip
    assert isinstance(up, GraphModule)
    assert isinstance(down, GraphModule)
    assert folds(down) in ([], ["w"])


@given(SMALL, st.integers(2, 4), SEEDS)
def test_one_weight_takes_up_several_orders(inner, dim, seed):
    """As that of a fused projection does; who else reads it keeps the original."""
    w, x = weight(dim, inner), randn(2, inner)
    module = traced(lambda x, w: (nnf.linear(x, w), w.sum()), (x, w))
    y, _ = module.graph.output_node().args[0]
    wanted, total = result(module, (x, w))
    for index in (free(1, dim, rng(seed)), free(1, dim, rng(seed + 1))):
        wanted = logical.rotate_channels(wanted, index)
        assert linear_up(y, index) == []
    got, same = result(module, (x, w))
    assert_close(got, wanted, rtol=0, atol=ATOL)
    assert torch.equal(same, total)
    assert len(folds(module)) == 1


def test_what_is_no_parameter_is_refused():
    index, x = torch.tensor([[1, 0, 2]]), randn(2, 5)
    found = lifted(lambda x, w: nnf.linear(x, w), (x, randn(3, 5)), index, linear_up)
    assert str(found) == "the weight is no plain parameter (at w)"
    found = lifted(lambda x, w: nnf.linear(x, w * 2), (x, weight(3, 5)), index, linear_up)
    assert str(found) == "the weight is computed in the graph (at mul)"
    found = lifted(
        lambda x, w: nnf.linear(x, w), (randn(2, 3, 5), weight(3, 5)), free(3, 3, rng(1))[None],
        linear_up,
    )  # fmt: skip
    assert str(found) == "the basis is not one of the layer's channels (at linear)"


def test_every_identity_is_tried():
    assert {push.__name__ for push in UP} == {
        "compose_up", "elementwise_up", "transpose_up", "reshape_up", "slice_up", "cat_up",
        "rotary_up", "scaled_up", "linear_up",
    }  # fmt: skip
    assert [elementwise_down, transpose_down, reshape_down, linear_down] == DOWN
