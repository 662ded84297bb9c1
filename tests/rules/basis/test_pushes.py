"""The identities by which changes of basis move, each over random shapes."""

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

from kvpass import ChannelOrder
from kvpass.graph.bases import (
    basis_of,
    blocks,
    changes_basis,
    compact,
    composed,
    embedded,
    in_basis,
    inverse,
    is_identity,
    leaves,
    of_heads,
    on_rank,
    part,
    shared,
    transposed,
)
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
from tests.bases import free, orthogonal, paired, rotation
from tests.strategies import SEEDS, randn

SMALL = st.integers(1, 4)
PAIRS = st.integers(1, 5)
# Sums of a few products of normal numbers, in another order.
ATOL = 1e-5


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Whether a basis is a rotation, not an order.
ROTATES = st.booleans()


def heads_basis(heads: int, dim: int, seed: int, rotates: bool = False) -> Tensor:
    """A basis of the channels of each head of ``[B, H, n, D]``."""
    if rotates:
        return of_heads(rotation(heads, dim, rng(seed)))
    return of_heads(ChannelOrder.of(free(heads, dim, rng(seed))))


def flat_basis(dims: int, size: int, seed: int, rotates: bool = False, blocks: int = 1) -> Tensor:
    """A basis of the channels of a tensor of so many dimensions; in blocks, if it rotates."""
    own = orthogonal(blocks, size, rng(seed)) if rotates else free(1, blocks * size, rng(seed))[0]
    return on_rank(own, dims)


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


@given(SMALL, SMALL, SEEDS, ROTATES, ROTATES)
def test_arithmetic_of_bases(heads, dim, seed, one, other):
    x, atol = randn(2, heads, 3, dim), ATOL * (one or other)
    first, second = heads_basis(heads, dim, seed, one), heads_basis(heads, dim, seed + 1, other)
    once = logical.rotate_channels(x, first)
    twice = logical.rotate_channels(once, second)
    assert_close(logical.rotate_channels(x, composed(first, second)), twice, rtol=0, atol=atol)
    assert_close(logical.rotate_channels(once, inverse(first)), x, rtol=0, atol=atol)
    assert is_identity(composed(first, inverse(first)))


@given(SMALL, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), SEEDS)
def test_arithmetic_of_blocks(dim, few, more, seed):
    """Rotations whose blocks are of different sizes, and parts of them."""
    x = randn(2, few * more * dim)
    fine = flat_basis(2, dim, seed, True, few * more)
    coarse = flat_basis(2, few * dim, seed, True, more)
    for first, second in ((fine, coarse), (coarse, fine)):
        wanted = logical.rotate_channels(logical.rotate_channels(x, first), second)
        got = logical.rotate_channels(x, composed(first, second))
        assert_close(got, wanted, rtol=0, atol=ATOL)
    wide = embedded(coarse, few * dim, (more + 2) * few * dim)
    assert part(wide, few * dim, (more + 1) * few * dim).equal(coarse)
    odd = embedded(fine, 1, few * more * dim + 3)
    inner = part(odd, 1, few * more * dim + 1)
    assert blocks(inner, few * more * dim).equal(blocks(fine, few * more * dim))
    assert leaves(odd, [0, few * more * dim + 1])
    assert dim == 1 or part(coarse, 0, 1) is None


@given(SMALL, SMALL, SEEDS, ROTATES)
def test_compose(heads, dim, seed, rotates):
    x, first = randn(2, heads, 3, dim), heads_basis(heads, dim, seed, rotates)
    module = traced(lambda x: x + 0, (x,))
    (source,) = module.graph.output_node().all_input_nodes
    inner = in_basis(source, first)
    if inner is source:
        return
    for second in (heads_basis(heads, dim, seed + 1), inverse(first)):
        wanted = logical.rotate_channels(logical.rotate_channels(x, basis_of(inner)), second)
        assert compose_up(inner, second) == [inner]
        got = logical.rotate_channels(x, basis_of(inner))
        assert_close(got, wanted, rtol=0, atol=ATOL * rotates)


@given(SMALL, SMALL, SMALL, SEEDS, st.sampled_from(["transpose", "permute"]), ROTATES)
def test_transpose(n, heads, dim, seed, name, rotates):
    args = (1, 2) if name == "transpose" else (0, 2, 1, 3)
    x, index = randn(2, n, heads, dim), heads_basis(heads, dim, seed, rotates)
    move = lambda x: getattr(x, name)(*args)  # noqa: E731
    assert isinstance(lifted(move, (x,), index, transpose_up), GraphModule)
    assert isinstance(lowered(move, (x.transpose(1, 2),), index, transpose_down), GraphModule)


def test_transposed_channels_are_refused():
    index = heads_basis(2, 3, 1)
    found = lifted(lambda x: x.transpose(2, 3), (randn(1, 2, 3, 4),), index[..., :3], transpose_up)
    assert isinstance(found, Miss)
    assert str(found) == "the channels are transposed (at transpose)"


@given(SMALL, SMALL, SMALL, SEEDS, ROTATES)
def test_reshape(n, heads, dim, seed, rotates):
    index = transposed(heads_basis(heads, dim, seed, rotates), [0, 2, 1, 3])
    split = lifted(
        lambda x: x.view(2, n, heads, dim), (randn(2, n, heads * dim),), index, reshape_up
    )
    joined = lowered(lambda x: x.reshape(2, n, -1), (randn(2, n, heads, dim),), index, reshape_down)
    assert isinstance(split, GraphModule)
    assert isinstance(joined, GraphModule)
    flat = flat_basis(2, dim, seed, rotates)
    same = lifted(lambda x: x.view(-1, dim), (randn(2, n, dim),), flat, reshape_up)
    assert isinstance(same, GraphModule)


def test_reshape_that_mixes_heads_is_refused():
    found = lifted(lambda x: x.reshape(6, 4), (randn(2, 3, 4),), free(6, 4, rng(0)), reshape_up)
    assert str(found) == "the view does more than split the channels into heads (at reshape)"


@given(SMALL, st.integers(1, 3), SEEDS, st.sampled_from(["slice", "chunk", "split"]), ROTATES)
def test_slice(dim, which, seed, name, rotates):
    """Of three runs of channels, one is changed; the others are read as they were."""
    index = flat_basis(3, dim, seed, rotates)
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
    assert part(basis_of(moved), start, start + dim).equal(index)


@given(SMALL, SMALL, SMALL, SMALL, SEEDS, ROTATES)
def test_cat(heads, first, second, n, seed, rotates):
    parts = [heads_basis(heads, dim, seed + dim, rotates) for dim in (first, second)]
    x, y = randn(2, heads, n, first), randn(2, heads, n, second, seed=1)
    both = (embedded(parts[0], 0, first + second), embedded(parts[1], first, first + second))
    index = composed(*both)
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
@given(SMALL, SMALL, SEEDS, ROTATES)
def test_elementwise(function, heads, dim, seed, rotates):
    args, index = (randn(2, heads, 3, dim),), heads_basis(heads, dim, seed, rotates)
    moved = [lifted(function, args, index, elementwise_up)]
    moved.append(lowered(function, args, index, elementwise_down))
    if function is ELEMENTWISE["shift"] and not is_identity(index) and rotates:
        assert {str(x) for x in moved} == {
            "sub is not linear in the channels that are rotated (at sub)"
        }
    else:
        assert all(isinstance(x, GraphModule) for x in moved)


@given(SMALL, st.integers(2, 5), SEEDS)
def test_factors_and_rotations(heads, dim, seed):
    """One for each token passes, one for each channel does not, and no quotient by what rotates."""
    args, basis = (randn(2, heads, 3, dim), weight(dim)), heads_basis(heads, dim, seed, True)
    by_token = lambda x, t: t * x  # noqa: E731
    assert isinstance(lifted(by_token, (args[0], args[0][..., :1]), basis, scaled_up), GraphModule)
    for function in (lambda x, w: x * w, lambda x, w: w / x, lambda x, w: x + w):
        assert not isinstance(lifted(function, args, basis, scaled_up), GraphModule)


def test_dropout_that_drops_is_refused():
    module = traced(lambda x: nnf.dropout(x, 0.5), (randn(1, 2, 3, 4),))
    (dropout,) = module.graph.output_node().all_input_nodes
    found = elementwise_up(dropout, heads_basis(2, 4, 0))
    assert str(found) == "dropout chooses channels (at dropout)"


def norm(x: Tensor, w: Tensor, form: str) -> Tensor:
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scaled * (1.0 + w.float()) if form == "gemma" else w * scaled


@pytest.mark.parametrize("form", ["llama", "gemma"])
@given(SMALL, st.integers(2, 5), SMALL, SEEDS)
def test_scaled_by_a_norm(form, heads, dim, n, seed):
    """Both factors of a norm: one per channel, a parameter, and one per head and token."""
    args = (randn(2, heads, n, dim), weight(dim))
    index = heads_basis(heads, dim, seed)
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


@given(SMALL, st.integers(2, 5), SEEDS, ROTATES)
def test_sums_of_squares_have_no_basis(heads, dim, seed, rotates):
    x, index = randn(2, heads, 3, dim), heads_basis(heads, dim, seed, rotates)
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
    found = lifted(*functions[by], heads_basis(2, 4, 1), scaled_up)
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


@pytest.mark.parametrize("neighbours", [False, True], ids=["half_split", "interleaved"])
@given(SMALL, PAIRS, SMALL, SEEDS)
def test_rotary_and_turns_of_its_pairs(neighbours, heads, pairs, n, seed):
    x, angle = randn(2, heads, n, 2 * pairs), randn(heads, pairs, seed=seed)
    cos, sin = (randn(2, 1, n, pairs, seed=s) for s in (1, 2))
    cos, sin = (
        t.repeat_interleave(2, -1) if neighbours else torch.cat([t, t], -1) for t in (cos, sin)
    )
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], -1).view(-1, 2, 2)
    basis = torch.zeros(heads, pairs, 2, pairs, 2)
    basis[:, range(pairs), :, range(pairs)] = turn.view(heads, pairs, 2, 2).transpose(0, 1)
    dims = (0, 1, 2, 3, 4) if neighbours else (0, 2, 1, 4, 3)
    basis = basis.permute(dims).reshape(1, heads, 1, 1, 2 * pairs, 2 * pairs)
    function = interleaved if neighbours else half_split(pairs)
    module = lifted(function, (x, cos, sin), basis, rotary_up)
    assert isinstance(module, GraphModule)
    assert {BasisCall.at(node).x.name for node in permutations(module)} <= {"x"}
    if pairs > 1:
        mixed = heads_basis(heads, 2 * pairs, seed, True)
        found = lifted(function, (x, cos, sin), mixed, rotary_up)
        assert found.reason == "the rotation mixes pairs of the rotary embedding"


@given(st.integers(2, 5), SEEDS)
def test_orders_that_break_pairs_are_refused(pairs, seed):
    index = heads_basis(2, 2 * pairs, seed)
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
@given(SMALL, SMALL, SMALL, SEEDS, ROTATES)
def test_linear(bias, inner, heads, dim, seed, rotates):
    c = heads * dim
    index = flat_basis(3, dim, seed, rotates, heads)
    cases = ((lifted, linear_up, c, inner), (lowered, linear_down, inner, c))
    for check, push, rows, columns in cases:
        args = (randn(2, 3, columns), weight(rows, columns), *[weight(rows)] * bias)
        function = (lambda x, w, b: nnf.linear(x, w, b)) if bias else lambda x, w: nnf.linear(x, w)
        module = check(function, args, index, push)
        assert isinstance(module, GraphModule)
        assert permutations(module) == []
        names = ["b", "w"] if bias and check is lifted else ["w"]
        assert folds(module) in ([], names)


@given(SMALL, SMALL, SMALL, SEEDS, ROTATES)
def test_addmm(inner, heads, dim, seed, rotates):
    c = heads * dim
    index = flat_basis(2, dim, seed, rotates, heads)
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


@given(SMALL, st.integers(2, 4), SEEDS, ROTATES, ROTATES)
def test_one_weight_takes_up_several_bases(inner, dim, seed, one, other):
    """As that of a fused projection does; who else reads it keeps the original."""
    w, x = weight(dim, inner), randn(2, inner)
    module = traced(lambda x, w: (nnf.linear(x, w), w.sum()), (x, w))
    y, _ = module.graph.output_node().args[0]
    wanted, total = result(module, (x, w))
    for index in (flat_basis(2, dim, seed, one), flat_basis(2, dim, seed + 1, other)):
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


@given(SMALL, SMALL, SMALL, SEEDS)
def test_queries_that_share_a_head_share_its_matrix(heads, groups, dim, seed):
    kept = rotation(heads, dim, rng(seed))
    every, few = of_heads(kept, heads * groups), compact(of_heads(kept))
    x = randn(2, heads * groups, 3, dim)
    assert shared(compact(every)).shape == few.shape
    once = logical.rotate_channels(x, shared(every))
    assert_close(once, logical.rotate_channels(x, every), rtol=0, atol=ATOL)
