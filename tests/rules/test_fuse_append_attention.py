"""Two appends and attention as one op: the identity, and when the rule leaves the three."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

from kvpass.graph.analysis.sites import Sites
from kvpass.ops.basis import rotate
from kvpass.recipes import recipe
from kvpass.rules import Context, apply_rules
from kvpass.rules.fuse_append_attention import FuseAppendAttention

ops = torch.ops.kvpass
PLANS = "int4.channel8/window=0,pack_every=8", "int2.token16/window=16,pack_every=1"
ROPE = "halves0-16"


def bound_graph(between=None, bases=(), tokens=1):
    """A decode step as binding leaves it, on real tensors; ``between`` adds nodes before attention
    and returns another result; ``bases``: those that new keys and the query are brought to."""
    torch.manual_seed(0)
    x, graph = torch.randn(1, 2, 23, 16), Graph()

    def placeholder(name, value):
        node = graph.placeholder(name)
        node.meta["example_value"] = value
        return node

    states = [
        [placeholder(f"{name}_{i}", t) for i, t in enumerate(ops.pack(x, plan))]
        for name, plan in zip("kv", PLANS, strict=True)
    ]
    new, q, rows = (
        placeholder(name, torch.randn(shape))
        for name, shape in (
            ("new", (1, 2, tokens, 16)),
            ("q", (1, 4, tokens, 16)),
            ("rows", (1, tokens, 16)),
        )
    )
    if bases:
        matrices = [placeholder(f"basis_{i}", basis) for i, basis in enumerate(bases)]
        stored = graph.call_function(rotate, (new, matrices[0]))
        q = graph.call_function(rotate, (q, matrices[-1]))
        graph.call_function(ops.append.default, (states[0], stored, PLANS[0]))
    else:
        graph.call_function(ops.append.default, (states[0], new, PLANS[0], rows, ROPE))
    graph.call_function(ops.append.default, (states[1], new, PLANS[1]))
    more = () if between is None else (between(graph, states, new),)
    arguments = (q, *states, None, 0.25, *PLANS)
    out = graph.call_function(ops.attention.default, arguments)
    graph.output((out, *more))
    return graph


def apply(graph, provider="triton", served_by=None):
    served_by = served_by or (lambda node: (provider, ()))
    context = Context(graph, Sites(), recipe("fp"), served_by=served_by)
    return apply_rules(context, [FuseAppendAttention()])


def targets(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


def run(graph):
    """The bytes of all results and arguments: memory that no token lives in may hold NaN."""
    inputs = [n.meta["example_value"].clone() for n in graph.find_nodes(op="placeholder")]
    return [x.view(torch.uint8) for x in (*GraphModule({}, graph)(*inputs), *inputs)]


def test_identity():
    graph = bound_graph()
    wanted = run(graph)
    (event,) = apply(graph)
    assert event.fired
    assert event.identity == FuseAppendAttention.identity
    assert targets(graph) == [ops.append_attention.default]
    assert all(torch.equal(a, b) for a, b in zip(run(graph), wanted, strict=True))


def rotation(heads, blocks, seed):
    """Of the channels of each head, or of all, in blocks."""
    size, generator = 16 // blocks, torch.Generator().manual_seed(seed)
    matrices = torch.randn(1, heads, 1, blocks, size, size, generator=generator)
    return torch.linalg.qr(matrices)[0].contiguous()


BASIS = rotation(2, 1, seed=1)


@given(st.integers(1, 2), st.sampled_from((1, 2, 8)), st.integers(1, 16), st.integers(0, 99))
def test_identity_with_a_rotation_of_new_keys_and_the_query(heads, blocks, tokens, seed):
    graph = bound_graph(bases=(rotation(heads, blocks, seed),), tokens=tokens)
    wanted = run(graph)
    (event,) = apply(graph)
    assert event.detail == "one op rotates new keys and the query, appends, and attends"
    assert targets(graph) == [ops.append_attention.default]
    assert all(torch.equal(a, b) for a, b in zip(run(graph), wanted, strict=True))


def decline_a_basis(node):
    return ("aten" if node.args[6] is not None else "triton"), ()


@pytest.mark.parametrize(
    ("graph", "served_by"),
    [
        (bound_graph(bases=(BASIS, BASIS.mT.contiguous())), None),
        (bound_graph(bases=(torch.arange(16).view(1, 1, 1, 16),)), None),
        (bound_graph(bases=(BASIS,)), decline_a_basis),
    ],
    ids=["two", "an order", "declined"],
)
def test_what_is_no_rotation_of_both_stays_in_front(graph, served_by):
    wanted = run(graph)
    (event,) = apply(graph, served_by=served_by)
    assert event.fired
    assert targets(graph) == [rotate, rotate, ops.append_attention.default]
    assert all(torch.equal(a, b) for a, b in zip(run(graph), wanted, strict=True))


def test_nothing_gains_where_plain_pytorch_would_serve_it():
    graph = bound_graph()
    assert apply(graph, "aten") == []
    assert ops.append.default in targets(graph)


def read_plain(graph, states, new):
    return graph.call_function(ops.unpack.default, (states[1], 24, PLANS[1], torch.float32))


def change_new(graph, states, new):
    return graph.call_function(operator.iadd, (new, 1.0))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (read_plain, "the cache is read by unpack.default before"),
        (change_new, "it is changed in place"),
    ],
)
def test_what_stands_between_is_a_refusal_with_its_reason(between, reason):
    graph = bound_graph(between)
    wanted = run(graph)
    (event,) = apply(graph)
    assert not event.fired
    assert event.detail.startswith(reason)
    assert ops.append_attention.default not in targets(graph)
    assert all(torch.equal(a, b) for a, b in zip(run(graph), wanted, strict=True))
