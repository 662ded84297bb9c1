"""Arguments of a bound graph that are numbers of the host, or as long as the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass._torch import fresh_size, tree_leaves
from kvpass._torch_sizes import (
    Size,
    all_symbols,
    constant,
    defined_symbols,
    size_expr,
    symbols_of,
)
from kvpass.graph.analysis.effects import is_int64
from kvpass.graph.bind.binding import NumberArgument
from kvpass.graph.bind.padding import ATTENTIONS
from kvpass.graph.calls import add_argument
from kvpass.graph.spellings import op_name
from kvpass.tensor.packed import PackedKV


def drop_unread(
    graph: Graph, positions: dict[Node, int], replaced: Collection[Node]
) -> frozenset[int]:
    """Erases the arguments that are numbers which nobody reads: a CUDA graph is recorded anew for
    each number, and the length of a cache is one at every step.

    Args:
        graph: bound.
        positions: of Dynamo's placeholders, some of which are erased by now.
        replaced: those of tensors that are to be erased, too.

    Returns:
        Where they were among Dynamo's.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _is_size(node):
            graph.erase_node(node)
    # A CUDA graph must not be replayed for a tensor of another size; and Dynamo may have found that
    # two numbers are one, which then has the name of either.
    unread = [n for n in graph.find_nodes(op="placeholder") if _is_size(n) and not n.users]
    ignored = {*unread, *replaced}
    needed = _all_symbols(n for n in graph.nodes if n not in ignored)
    spare = {n for n in unread if n in positions and not symbols_of(_example(n)) & needed}
    dropped = spare.union(replaced)
    for node in dropped:
        graph.erase_node(node)
    return frozenset(positions[node] for node in dropped)


def size_arguments(graph: Graph, examples: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Adds the sizes that the graph computes with and none of its arguments has any more.

    Args:
        graph: bound.
        examples: Dynamo's, of all its arguments.

    Returns:
        The arguments, and their dimensions, of which these are the sizes.
    """
    found = {s for n in graph.find_nodes(op="placeholder") for s in defined_symbols(_example(n))}
    missing = _all_symbols(graph.nodes) - found
    sizes: list[tuple[int, int]] = []
    for position, example in enumerate(examples):
        for dim, size in enumerate(example.shape if isinstance(example, torch.Tensor) else ()):
            if missing & (symbols := defined_symbols(size)):
                missing -= symbols
                add_argument(graph, f"kvpass_size{len(sizes)}", size)
                sizes.append((position, dim))
    return tuple(sizes)


def growing_argument(graph: Graph, packed: Sequence[PackedKV]) -> str | None:
    """What in the bound ``graph`` is, or is as long as, the number of tokens in one of the
    ``packed`` tensors that it was made for, and so changes at every step; None if nothing does."""
    for node in graph.nodes:
        mask = node.args[3] if node.target in ATTENTIONS else None
        if mask is None or "widened" in mask.meta:
            continue
        if constant(_example(mask).shape[-1]) is None:
            return "its attention mask has a column for each token in the cache"
    lengths = [x.shape[2] for x in packed if x.plan.room is None]
    symbols = all_symbols(lengths)
    for node in graph.find_nodes(op="placeholder"):
        example = _example(node)
        if symbols & all_symbols([example]):
            said = "is" if _is_size(node) else "is as long as"
            return f"its argument {node.name} {said} the number of tokens in the cache"
    return None


def room_argument(graph: Graph, packed: Sequence[PackedKV]) -> bool:
    """Adds an argument that is another number wherever the ``packed`` tensors have other room, if
    any of them grow: a CUDA graph was recorded for the room, and tells calls apart by numbers and
    addresses alone. Whether there is one."""
    growing = [x for x in packed if x.plan.room is None]
    if growing:
        room = fresh_size(graph, growing[0].segment_ends, "kvpass_room", 2)
        add_argument(graph, "kvpass_room", room)
    return bool(growing)


def number_arguments(graph: Graph, symbols: Mapping[Any, int]) -> tuple[NumberArgument, ...]:
    """Makes tensors of the numbers of the host that are added to tensors of integers, as positions
    count from the tokens that have come.

    Args:
        graph: bound.
        symbols: positions of those of Dynamo's arguments that numbers depend on.
    """
    made: dict[tuple[Any, torch.device], Node] = {}
    numbers: list[NumberArgument] = []
    for node in list(graph.nodes):
        if op_name(node) != "add" or len(node.args) != 2 or node.kwargs:
            continue
        for steps, number in (node.args, node.args[::-1]):
            if not is_int64(steps) or not isinstance(number, Node) or not _is_size(number):
                continue
            value, tensor = _example(number), _example(steps)
            if not symbols_of(value) <= set(symbols):
                continue
            key = (size_expr(value), tensor.device)
            if key not in made:
                name = f"kvpass_number{len(made)}"
                made[key] = add_argument(graph, name, tensor.new_empty((), dtype=torch.int64))
                numbers.append(NumberArgument(Size(value, symbols), tensor.device))
            node.args = (steps, made[key])
    return tuple(numbers)


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _all_symbols(nodes: Iterable[Node]) -> set[Any]:
    return all_symbols(x for n in nodes for x in tree_leaves(_example(n)))


def _is_size(node: Node) -> bool:
    return isinstance(_example(node), torch.SymInt)
