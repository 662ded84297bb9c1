"""Names of operations and of their arguments, in all spellings."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as nnf
from torch.fx import symbolic_trace

from kvpass.graph.spellings import OPS, VIEWS, argument, op_name, set_argument


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
        (lambda x, y: torch.multiply(x, y), "mul"),
        (lambda x, y: x.subtract_(y), "subtract_"),
        (lambda x, y: operator.and_(x, y), "and_"),
        (lambda x, y: torch.logical_and(x, y), "logical_and"),
        (lambda x, y: ~x, "invert"),
        (lambda x, y: x.less_equal(y), "le"),
        (lambda x, y: x.erf(), "erf"),
        (lambda x, y: x.where(y, 0), "another where"),
        (lambda x, y: torch.dropout(x, 0.5, True), "another dropout"),
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


def test_defaults_name_parameters():
    for op in OPS.values():
        assert op.targets
        assert op.defaults.keys() <= set(op.params)
        assert not op.commutative or op.params == ("input", "other")


def test_arguments_are_set_where_they_are_passed():
    node, nodes = last(lambda x: torch.add(x, other=nnf.linear(x, x)))
    set_argument(node, "input", 1)
    set_argument(node, "other", 2)
    assert (node.args, node.kwargs) == ((1,), {"other": 2})
    set_argument(nodes["linear"], "bias", nodes["x"])
    assert argument(nodes["linear"], "bias") is nodes["x"]


def test_no_spelling_stands_for_two_operations():
    targets = [target for op in OPS.values() for target in set(op.targets)]
    assert len(targets) == len(set(targets))
    assert {"squeeze"} == VIEWS - OPS.keys()


def test_methods_take_the_same_parameters_as_functions():
    """As the schemas say, whose first parameter is the tensor itself."""
    others = {"sizes": {"split_size", "split_sizes"}, "other": {"mat2"}}
    others |= {"dim0": {"axis0"}, "dim1": {"axis1"}}
    for name, op in OPS.items():
        for method in (t for t in op.targets if isinstance(t, str)):
            packet = getattr(torch.ops.aten, method, None)
            overloads = (
                packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
            )
            schemas = [getattr(packet, o)._schema.arguments for o in overloads]
            for position, param in list(enumerate(op.params))[1:]:
                known = {s[position].name for s in schemas if len(s) > position}
                assert not known or known & {param, *others.get(param, ())}, (name, method, known)
