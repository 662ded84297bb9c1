"""Padding masks of growing caches, whose columns are as many as the tokens in them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from kvpass._torch import fresh_size, mark_static_input
from kvpass.graph.calls import add_argument, add_call, erase_unread

ops = torch.ops.kvpass
ATTENTIONS = (ops.attention.default, ops.attention_chunks.default)
_EXAMPLE = 256


def widen_padding(graph: Graph, masks: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Gives the bound ``graph`` masks that have columns for more tokens than there are, where
    attention alone reads them: it looks at no further ones.

    Args:
        graph: bound. The mask of an attention has the argument that it shows as its ``padding``.
        masks: those arguments ``[B, L]``.

    Returns:
        The masks that are replaced, and the arguments in their places.
    """
    replaced: list[Node] = []
    arguments: list[Node] = []
    for mask in masks:
        views = [n for n in graph.nodes if n.meta.get("padding") is mask]
        between = {view.all_input_nodes[0] for view in views}
        readers = [user for node in {mask, *between} for user in node.users]
        attentions = {user for view in views for user in view.users}
        if not set(readers) <= {*between, *views} or not all(map(_attends, attentions)):
            continue
        example = mask.meta["example_value"]
        columns = fresh_size(graph, example, f"kvpass_columns{len(arguments)}", _EXAMPLE)
        wide = example.new_empty((example.shape[0], columns))
        argument = add_argument(graph, f"kvpass_padding{len(arguments)}", wide)
        mark_static_input(argument)
        for view in views:
            with graph.inserting_before(view):
                seen = argument
                if wide.dtype != torch.bool:
                    seen = add_call(graph, torch.ne, argument, 0)
                new = add_call(graph, operator.getitem, seen, view.args[1])
            new.meta["widened"] = True
            view.replace_all_uses_with(new)
            erase_unread(view)
        replaced.append(mask)
        arguments.append(argument)
    return replaced, arguments


def _attends(node: Node) -> bool:
    return node.target in ATTENTIONS
