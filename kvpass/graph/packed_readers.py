"""Who reads a packed cache tensor, and what is put in front of those who cannot."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kvpass._torch import symbol_node
from kvpass.errors import UnmatchedGraphError
from kvpass.graph.analysis.reads import changes
from kvpass.graph.logical_calls import PackedCall
from kvpass.graph.pattern import op_name
from kvpass.ops import logical
from kvpass.tensor.packed import PackedKV


def unknown_readers(node: Node) -> list[Node]:
    """What reads the packed tensor ``node``, not its size alone, and needs it plain; in order."""
    known = (*logical.LOGICAL, "output")
    return sorted(user for user in node.users if user.target not in known and not _is_size(user))


def size_readers(node: Node) -> list[Node]:
    """What reads the size alone of the packed tensor ``node``."""
    return [user for user in node.users if _is_size(user)]


def decode_in_front(node: Node) -> list[Node]:
    """Lets all that cannot read the packed tensor ``node`` read what one ``unpack`` makes of it.

    Returns:
        Those readers.

    Raises:
        UnmatchedGraphError: if one of them would change the tensor in place.
    """
    readers = unknown_readers(node)
    for change in changes(node):
        raise UnmatchedGraphError(
            f"The packed cache tensor {node.name} is changed in place by {op_name(change)} (at "
            f"{change.name}), which is no known cache update. Begin with a new cache, and "
            "without kvpass."
        )
    if readers:
        with node.graph.inserting_before(readers[0]):
            plain = PackedCall(node).insert(node.graph)
        example = node.meta["example_value"]
        plain.meta["example_value"] = example.decode() if isinstance(example, PackedKV) else example
        for reader in readers:
            reader.replace_input_with(node, plain)
    return readers


def _is_size(reader: Node) -> bool:
    sizes = reader.target == "size" and len(reader.args) == 1 and not reader.kwargs
    return sizes or isinstance(reader.meta.get("example_value"), int | torch.SymInt)


def replace_size(reader: Node) -> None:
    """Computes what ``reader`` asks of a packed tensor (``numel``, say) from the graph's
    symbols."""
    for part in list(reader.users):
        if op_name(part) == "getitem" and _is_size(part):
            replace_size(part)
    graph, value = reader.graph, reader.meta["example_value"]
    if reader.users:
        with graph.inserting_before(reader):
            whole = isinstance(value, tuple)
            size = (
                tuple(symbol_node(graph, v) for v in value) if whole else symbol_node(graph, value)
            )
        for user in list(reader.users):
            user.args = map_arg(user.args, lambda n: size if n is reader else n)
            user.kwargs = map_arg(user.kwargs, lambda n: size if n is reader else n)
    graph.erase_node(reader)


def is_packed(node: Node) -> bool:
    """Whether ``node`` stands for a packed cache tensor."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("example_value"), PackedKV)
    return node.target in (logical.append, logical.reorder_chunks, logical.slide)
