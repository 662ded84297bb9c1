"""Linear layers of a decode step, as ops that are bound by reading their weights."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvpass._torch import LINEAR
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import linear as _registers_the_op  # noqa: F401
from kvpass.rules.base import Context, Rule

_FUSED = torch.ops.kvpass.linear.default


class FewTokenLinear(Rule):
    """Lets kernels that are made for few tokens compute linear layers. Applies to bound graphs."""

    name = "few_token_linear"
    identity = "linear(x, weight, bias)  =  kvpass::linear(x, weight, bias)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies where a kernel takes the layer, and nothing is to be differentiated."""
        if node.target is not LINEAR or node.kwargs:
            return None
        examples = [n.meta["example_value"] for n in (*node.all_input_nodes, node)]
        # Under autocast it would compute in another type.
        if len({x.dtype for x in examples}) > 1:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in examples):
            return None
        with context.graph.inserting_before(node):
            trial = context.graph.call_function(_FUSED, node.args)
        provider, _ = context.served_by(trial)
        context.graph.erase_node(trial)
        return None if provider == "aten" else {}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        node.target = _FUSED
        return "computed for few tokens"
