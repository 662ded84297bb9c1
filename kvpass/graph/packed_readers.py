"""Who reads a packed cache tensor."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvpass.graph.logical_calls import PackedCall
from kvpass.ops import logical
from kvpass.tensor.packed import PackedKV


def is_packed(node: Node) -> bool:
    """Whether ``node`` stands for a packed cache tensor."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("example_value"), PackedKV)
    return node.target in (logical.append, logical.reorder_chunks, logical.slide)


def is_size(reader: Node) -> bool:
    """Whether ``reader`` of a packed tensor reads its size alone."""
    sizes = reader.target == "size" and len(reader.args) == 1 and not reader.kwargs
    return sizes or isinstance(reader.meta.get("example_value"), int | torch.SymInt)


def unknown_readers(node: Node) -> list[Node]:
    """What needs the packed tensor ``node`` plain, not its size alone; in order."""
    known = (*logical.LOGICAL, "output")
    return sorted(user for user in node.users if user.target not in known and not is_size(user))


def unpacked(node: Node) -> Node:
    """The packed tensor ``node`` decoded, where nodes are inserted now."""
    plain, example = PackedCall(node).insert(node.graph), node.meta["example_value"]
    plain.meta["example_value"] = example.decode() if isinstance(example, PackedKV) else example
    return plain
