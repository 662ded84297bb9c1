"""How an attention reads its keys and values, and whether that may move to its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kvpass._torch import same_shape
from kvpass.graph.pattern import Captures, Miss, Step, argument, mutates, op_name

# What hands on its input, or may.
VIEWS = {"chunk", "contiguous", "expand", "getattr", "getitem", "permute", "reshape", "split"}
VIEWS |= {"squeeze", "to", "transpose", "unsqueeze"}


@dataclass
class Read:
    """How a product reads a cache tensor: with so many heads (after repetition), batch and heads
    as one dimension, the last two dimensions swapped."""

    heads: int
    merged: bool = False
    swapped: bool = False


def follow(source: Node, steps: Sequence[Step]) -> Read | Miss:
    """How the cache tensor ``source`` is read through ``steps``."""
    before = source.meta["example_value"]
    if before.dim() != 4:
        return Miss(f"{source.name} has {before.dim()} dimensions, expected 4", source)
    read = Read(before.shape[1])
    for step in steps:
        after = step.node.meta["example_value"]
        if reason := _step_miss(step, before, after, read):
            return Miss(reason, step.node)
        before = after
    return read


def _step_miss(step: Step, before: Any, after: Any, read: Read) -> str | None:
    """Follows one step of a read. Returns why it is not what it looks like, or None."""
    old, new = before.shape, after.shape
    if step.name == "cast":
        if torch.promote_types(before.dtype, after.dtype) != after.dtype:
            return f"{before.dtype} is narrowed to {after.dtype}"
    elif step.name == "swap":
        if not _swaps_last_two(step.node, before.dim()):
            return "other dimensions than the last two are swapped"
        read.swapped = not read.swapped
    elif step.name == "repeat":
        if not _repeats_heads(step.node, old, new):
            return "heads are not repeated one by one"
        read.heads = new[1]
    elif step.name == "view" and not same_shape(old, new):
        if len(old) != 4 or len(new) != 3 or not same_shape(old[2:], new[1:]):
            return "the view does more than join batch and heads"
        read.merged = True
    return None


def _swaps_last_two(node: Node, dims: int) -> bool:
    if op_name(node) == "getattr":
        return True
    if op_name(node) == "transpose":
        swapped = {argument(node, name) % dims for name in ("dim0", "dim1")}
        return swapped == {dims - 2, dims - 1}
    given: Any = node.args[1:] or (node.kwargs.get("dims"),)
    order = given[0] if isinstance(given[0], list | tuple) else given
    return [d % dims for d in order] == [*range(dims - 2), dims - 1, dims - 2]


def _repeats_heads(node: Node, old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether query head ``i`` reads KV head ``i // groups``."""
    if len(old) != 4 or len(new) != 4 or not same_shape([old[0], *old[2:]], [new[0], *new[2:]]):
        return False
    if op_name(node) == "repeat_interleave":
        repeats = argument(node, "repeats")
        return isinstance(repeats, int) and argument(node, "dim") in (1, -3)
    if op_name(node) == "expand":
        return old[1] in (1, new[1])
    return bool(new[1] % old[1] == 0)


def disturbance(found: Captures, root: Node) -> Miss | None:
    """A change in place, between one of the reads of the attention and its end, of what it
    reads."""
    for source, reader in _pairs(found, root):
        if _changes(reader, source) and len(source.users) > 1:
            return Miss(f"{source.name} is changed in place and read elsewhere", reader)
        for change in changes(source):
            if change is not reader and reader < change < root:
                return Miss(f"{source.name} is changed in place", change)
    return None


def changes(node: Node) -> list[Node]:
    """What changes ``node`` in place, itself or a view of it."""
    views = [node, *(user for user in node.users if _is_view(user, node))]
    return [user for view in views for user in view.users if _changes(user, view)]


def _is_view(user: Node, node: Node) -> bool:
    """Whether ``user`` may share the storage of ``node``: a cast to another dtype does not."""
    dtypes = [getattr(n.meta.get("example_value"), "dtype", None) for n in (user, node)]
    return op_name(user) in VIEWS and (None in dtypes or dtypes[0] == dtypes[1])


def _changes(user: Node, node: Node) -> bool:
    """Whether ``user`` changes ``node``, not what else it reads."""
    changed = (*user.args[:1], user.kwargs.get("input"), user.kwargs.get("out"))
    return mutates(user) and any(x is node for x in changed)


def _pairs(found: Captures, root: Node) -> Iterator[tuple[Node, Node]]:
    """Every node that the attention reads, with its reader."""
    steps = [step.node for name in found if name.endswith("_steps") for step in found[name]]
    inner = [found[name] for name in ("product", "softmax") if name in found]
    for reader in [*steps, *inner, root]:
        for source in reader.all_input_nodes:
            yield source, reader


def last_reader(node: Node) -> Node:
    """The last node that reads ``node`` or a view of it, ``node`` itself if nothing does."""
    last = node
    for user in node.users:
        if user.op != "output":
            found = last_reader(user) if op_name(user) in VIEWS else user
            last = max(last, found)
    return last
