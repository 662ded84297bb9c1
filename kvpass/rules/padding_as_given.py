"""Padding that attention looks up token by token is read as the model was given it."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch.fx import Node

from kvpass.format.tensor_plan import TensorPlan
from kvpass.graph.analysis.masks import Masks
from kvpass.graph.calls import add_call, erase_unread
from kvpass.graph.logical_calls import AppendCall, AttentionCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.rules.base import Context, Rule
from kvpass.tensor.packed import PackedKV

_DTYPES = (torch.bool, torch.int32, torch.int64)
_BY_TOKEN = (slice(None), None, None, slice(None))


# Attention looks at no columns behind the tokens in the cache (`kvpass.ops.attention`), and the
# callable around the graph refuses a mask of fewer. What is left has no size that follows from the
# number of tokens: where steps are replayed it gets columns for all that there is room for.
class PaddingAsGiven(Rule):
    """Reads the mask ``[B, L]`` of a growing cache without an index for each token."""

    name = "padding_as_given"
    identity = "attention(q, K, V, mask[b, k])  =  attention(q, K, V, mask[:, None, None, :])"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every attention over a growing cache whose mask is all padding."""
        call = AttentionCall.of(node) if context.replayed else None
        if call is None or call.mask is None or not _grows(call.keys):
            return None
        padding = context.masks.padding(call.mask)
        argument = None if padding is None else _argument(padding, context.masks)
        return None if argument is None else {"padding": padding, "argument": argument}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        call, padding = AttentionCall.at(node), found["padding"]
        assert call.mask is not None
        views = [n for n in padding.users if n.meta.get("padding") is found["argument"]]
        if views:
            (view,) = views
        else:
            with context.graph.inserting_after(padding):
                view = add_call(context.graph, operator.getitem, padding, _BY_TOKEN)
            view.meta["padding"] = found["argument"]
        replace(call, mask=view).write(node)
        erase_unread(call.mask)
        return f"{found['argument'].name} as it is"


def _grows(keys: Node) -> bool:
    """Whether these keys are a cache argument that holds every token in its place."""
    past = AppendCall.at(keys).past if AppendCall.of(keys) else None
    example = None if past is None else past.meta.get("example_value")
    if past is None or past.op != "placeholder" or not isinstance(example, PackedKV):
        return False
    plan = example.plan
    grows = plan.room is None and plan.window_size is None and not plan.retention.pivotal
    return grows and type(plan) is TensorPlan


def _argument(padding: Node, masks: Masks) -> Node | None:
    """The argument that ``padding`` is, or that it is the truth of."""
    is_truth = padding.op == "call_method" and padding.target == "to"
    node = padding.all_input_nodes[0] if is_truth else padding
    if node.op != "placeholder" or masks.indices.writes.to(node):
        return None
    return node if node.meta["example_value"].dtype in _DTYPES else None
