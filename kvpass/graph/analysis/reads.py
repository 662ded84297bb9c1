"""How an attention reads its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kvpass._torch_sizes import same_shape
from kvpass.graph.pattern import Miss, Step
from kvpass.graph.spellings import VIEWS, argument, op_name


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
    if op_name(node) in ("getattr", "mT"):
        return True
    if op_name(node) == "transpose":
        swapped = {argument(node, name) % dims for name in ("dim0", "dim1")}
        return swapped == {dims - 2, dims - 1}
    return permuted_dims(node) == [*range(dims - 2), dims - 1, dims - 2]


def permuted_dims(node: Node) -> list[int]:
    """The dimensions of ``permute``, however they were passed, counted from 0."""
    given: Any = node.args[1:] or (node.kwargs.get("dims"),)
    order = given[0] if isinstance(given[0], list | tuple) else given
    return [dim % len(order) for dim in order]


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


def last_reader(node: Node) -> Node:
    """The last node that reads ``node`` or a view of it, ``node`` itself if nothing does."""
    last = node
    for user in node.users:
        if user.op != "output":
            found = last_reader(user) if op_name(user) in VIEWS else user
            last = max(last, found)
    return last
