"""Linear layers of a decode step, as ops that are bound by reading their weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node

from kvpass._torch import LINEAR
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import linear as _registers_the_op  # noqa: F401
from kvpass.rules.base import Context, Rule

_FUSED = torch.ops.kvpass.linear.default
# Bytes of a weight: below, calling a kernel takes longer than reading it, and PyTorch's own is
# called faster. Where steps are replayed, kernels are not called one by one.
_LEAST_BYTES = 2**18


class FewTokenLinear(Rule):
    """Lets kernels that are made for few tokens compute linear layers. Applies to bound graphs."""

    name = "few_token_linear"
    identity = (
        "linear(x, weight, bias)  =  kvpass::linear(x, weight, bias);  "
        "addmm(bias, x, weight)  =  kvpass::linear(x, weight.t(), bias)"
    )
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies where a kernel takes the layer, and nothing is to be differentiated."""
        if node.target not in (LINEAR, torch.addmm) or node.kwargs:
            return None
        if node.target is torch.addmm and not _adds_a_row(node):
            return None
        examples = [n.meta["example_value"] for n in (*node.all_input_nodes, node)]
        # Under autocast it would compute in another type.
        if len({x.dtype for x in examples}) > 1:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in examples):
            return None
        with context.graph.inserting_before(node):
            arguments = _arguments(node)
        weight = arguments[1].meta["example_value"]
        called = context.replayed or weight.numel() * weight.element_size() >= _LEAST_BYTES
        if called and context.provider_of(node, _FUSED, arguments) != "aten":
            return {"arguments": arguments}
        for part in {n for n in arguments if isinstance(n, Node)}.difference(node.all_input_nodes):
            context.graph.erase_node(part)
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        node.target, node.args = _FUSED, found["arguments"]
        return "computed for few tokens"


def _adds_a_row(node: Node) -> bool:
    """Whether what ``addmm`` adds is a bias, the same for each token."""
    added, _, weight = (n.meta["example_value"] for n in node.args if isinstance(n, Node))
    return bool(added.dim() == 1 and added.shape[0] == weight.shape[1])


def _arguments(node: Node) -> tuple[Any, ...]:
    """Arguments of the op. A weight stored by inputs is turned, without a copy; the parts of
    one of torchao are read from it."""
    if node.target is torch.addmm:
        bias, x, weight = node.args
        assert isinstance(weight, Node)
        turned = node.graph.call_function(torch.t, (weight,))
        turned.meta["example_value"] = weight.meta["example_value"].t()
        return x, turned, bias
    x, weight, *bias = node.args
    assert isinstance(weight, Node)
    if not _scales_rows(weight.meta["example_value"]):
        return node.args
    parts = [_attribute(weight, name) for name in ("qdata", "scale")]
    return (x, parts[0], bias[0] if bias else None, parts[1])


def _scales_rows(weight: Any) -> bool:
    """Whether ``weight`` is one of torchao in int8, whose rows have a scale each, that multiplies
    activations as they are."""
    if type(weight).__name__ != "Int8Tensor" or not type(weight).__module__.startswith("torchao."):
        return False
    as_it_is = weight.act_quant_kwargs is None and weight.act_pre_scale is None
    return as_it_is and list(weight.block_size) == [1, weight.shape[1]]


def _attribute(x: Node, name: str) -> Node:
    first = x.graph.find_nodes(op="placeholder")[-1].next
    # As early as can be: other layers may want it before this one.
    with x.graph.inserting_before(first) if x.op == "placeholder" else nullcontext():
        node = x.graph.call_function(getattr, (x, name))
    node.meta["example_value"] = getattr(x.meta["example_value"], name)
    return node
