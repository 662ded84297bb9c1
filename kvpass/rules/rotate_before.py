"""Where no kernel rotates keys and stores them, they are rotated before they are stored."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvpass.graph.calls import add_call
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops.cos_sin import rotated
from kvpass.rules.base import Context, Rule

_APPENDS = (torch.ops.kvpass.append.default, torch.ops.kvpass.append_chunks.default)


# Inductor's kernels rotate then, and maybe others store.
class RotateBefore(Rule):
    """Takes the rotary embedding out of an append that plain PyTorch would serve. Applies to bound
    graphs."""

    name = "rotate_before"
    identity = "append(state, x, plan, cos_sin, rope)  =  append(state, rope(x, cos_sin), plan)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends whose providers decline a rotary embedding."""
        if node.target not in _APPENDS or len(node.args) < 5:
            return None
        provider, declined = context.served_by(node)
        return {"declined": declined} if provider == "aten" else None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        state, new, plan, cos_sin, rope = node.args
        with context.graph.inserting_before(node):
            x = add_call(context.graph, rotated, new, cos_sin, rope)
        node.args = (state, x, plan)
        reasons = "; ".join(f"{name} declined: {reason}" for name, reason in found["declined"])
        return f"rotated before they are stored: {reasons or 'no other provider'}"
