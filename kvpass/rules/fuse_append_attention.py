"""A decode step of one layer, two appends and the attention over them, is one op."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kvpass.graph.calls import erase_unread
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.ops.append_attention import StepArguments
from kvpass.ops.basis import rotate
from kvpass.rules.base import Context, Rule

ops = torch.ops.kvpass
# Of each attention: what appends to its keys and values, and the op that does it all.
_OPS = {
    ops.attention.default: (ops.append.default, ops.append_attention.default),
    ops.attention_chunks.default: (
        ops.append_chunks.default, ops.append_attention_chunks.default,
    ),
}  # fmt: skip
# The fused op's arguments in front of those of attention.
_COUNT = len(StepArguments._fields)


# Where somebody does it in fewer steps than the three ops, or than five with a rotation of new keys
# and of the query: each is a launch on a GPU, and nothing but them reads the state in between.
class FuseAppendAttention(Rule):
    """Lets one op append keys and values and attend to them. Applies to bound graphs."""

    name = "fuse_append_attention"
    identity = (
        "append(keys, k); append(values, v); attention(q, keys, values)"
        "  =  append_attention(k, v, q, keys, values)\n"
        "append_attention(R(k), v, R(q), keys, values)"
        "  =  append_attention(k, v, q, keys, values, R)"
    )
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to attention over keys and values that its graph has appended to before."""
        if node.target not in _OPS:
            return None
        append, fused = _OPS[node.target]
        keys, values = (_append_to(state, append, node) for state in node.args[1:3])
        if keys is None or values is None or len(values.args) > 3:
            return None
        if (reader := _reader_between(node, keys, values)) is not None:
            return Miss(f"the cache is read by {op_name(reader)} before", reader)
        arguments = _arguments(node, keys, values)
        changed = next((x for x in arguments[:6] if x in context.changed), None)
        if changed is not None:
            return Miss("it is changed in place", changed)
        for tried in (_unrotated(arguments, context), arguments):
            if tried is not None and context.provider_of(node, fused, tried) != "aten":
                return {"appends": (keys, values), "fused": fused, "arguments": tried}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        rotated: tuple[Any, ...] = found["appends"][0].args[1], node.args[0]
        node.target, node.args = found["fused"], found["arguments"]
        for append in found["appends"]:
            context.graph.erase_node(append)
        if StepArguments(*found["arguments"][:_COUNT]).basis is None:
            return "one op appends keys and values and attends to them"
        for x in rotated:
            erase_unread(x)
        return "one op rotates new keys and the query, appends, and attends"


def _append_to(state: Any, append: Any, attention: Node) -> Node | None:
    """The last ``append`` to this state before ``attention``, or None."""
    users: list[Node] = sorted(state[0].users)
    appends = [n for n in users if n.target is append and n < attention]
    return appends[-1] if appends else None


def _reader_between(attention: Node, *appends: Node) -> Node | None:
    """Who uses a tensor of the state after its append and before ``attention``."""
    for append in appends:
        state: Any = append.args[0]
        users: set[Node] = {user for tensor in state for user in tensor.users}
        for user in users.difference(appends):
            if append < user < attention:
                return user
    return None


def _arguments(attention: Node, keys: Node, values: Node) -> tuple[Any, ...]:
    """The arguments of the fused op."""
    rotation = keys.args[3:5] or (None, None)
    clips = keys.kwargs.get("clip"), values.kwargs.get("clip")
    return (keys.args[1], values.args[1], *rotation, *clips, None, *attention.args)


def _unrotated(arguments: tuple[Any, ...], context: Context) -> tuple[Any, ...] | None:
    """The arguments with new keys and the query in the basis before theirs, which both share; None
    if there is no such basis."""
    step: Any = StepArguments(*arguments[:_COUNT])
    q, *rest = arguments[_COUNT:]
    if step.cos_sin is not None or not (step.new_keys.target is q.target is rotate):
        return None
    (keys, basis), (queries, other) = step.new_keys.args, q.args
    rotation = basis is other and basis.meta["example_value"].is_floating_point()
    if not rotation or keys in context.changed or queries in context.changed:
        return None
    return (*step._replace(new_keys=keys, basis=basis), queries, *rest)
