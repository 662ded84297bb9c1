"""Permutations of channels move through the graph, until the weights have taken them up."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import Tensor
from torch.fx import Node

from kvpass.graph.orders import index_of, is_identity, is_permutation
from kvpass.graph.pattern import Captures, Miss, op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.permutation.arithmetic import Elementwise, Scaled
from kvpass.rules.permutation.base import Moved, PushDown, PushUp, shape_of
from kvpass.rules.permutation.rotary import Rotary
from kvpass.rules.permutation.views import Cat, Compose, Reshape, Slice, Transpose, unmoved
from kvpass.rules.permutation.weights import Linear

UP: tuple[PushUp, ...] = (
    Compose(),
    Elementwise(),
    Transpose(),
    Reshape(),
    Slice(),
    Cat(),
    Rotary(),
    Scaled(),
    Linear(),
)
DOWN: tuple[PushDown, ...] = (Elementwise(), Transpose(), Reshape(), Linear())


# For every f in `kvpass.rules.pushes`.
class PushOrder(Rule):
    """Moves permutations up to the weights that compute what they permute, or down to those that
    read it, as far as each can go."""

    name = "push_order"
    identity = "P(f(x))  =  f(P(x))\nf(P(x))  =  P(f(x))"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every permutation that is to move."""
        movable = is_permutation(node) and node.meta["permutation"] != "stays"
        return {} if movable and "left" not in node.meta else None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        waiting, passed = [node], []
        while waiting:
            permute = waiting.pop()
            if permute._erased:
                continue
            permute.meta.pop("left", None)
            moved = push(permute, context)
            if isinstance(moved, Miss):
                permute.meta["left"] = moved
            else:
                passed.append(moved[0])
                # Of those that could not be moved before, fewer may be read by others now.
                waiting += moved[1]
        return f"through {', '.join(passed)}" if passed else "not moved"


class ChannelGather(Rule):
    """Says which permutations stay in the graph, and why. It changes nothing."""

    name = "channel_gather"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """A `Miss` for every permutation that could not be moved into weights."""
        left = node.meta.get("left")
        return None if left is None else Miss(f"channels are gathered in every call: {left}")

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Never called."""
        raise NotImplementedError


# Where P' has each head's order g times, and t is the same for all heads.
class ShareTables(Rule):
    """Indexes cosines and sines once for queries and keys, although several queries share a key."""

    name = "share_tables"
    identity = "P(t)  =  P'(t)[:, ::g]"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies where the same table is permuted for more heads, too."""
        if not is_permutation(node) or node.meta["permutation"] != "stays":
            return None
        (table, _), index = node.args, index_of(node)
        assert isinstance(table, Node)
        for other in table.users:
            if is_permutation(other) and other is not node:
                found = _repeats(index_of(other), index)
                if found is not None and len(shape_of(table)) == index.dim():
                    return {"other": other, "dim": found[0], "step": found[1]}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        other, dim, step = found["other"], found["dim"], found["step"]
        index = (*[slice(None)] * dim, slice(None, None, step))
        with context.graph.inserting_after(max(other, node)):
            part = context.graph.call_function(operator.getitem, (other, index))
        part.meta = {**node.meta}
        del part.meta["permutation"]
        node.replace_all_uses_with(part)
        context.graph.erase_node(node)
        return f"shared by {step} heads"


def push(permute: Node, context: Context) -> tuple[str, list[Node]] | Miss:
    """Moves one permutation through one operation.

    Returns:
        The operation's name, and the permutations that took its place.
    """
    (x, _), index = permute.args, index_of(permute)
    assert isinstance(x, Node)
    if is_identity(index):
        _replace(permute, x)
        return "nothing", []
    name = op_name(x)
    if permute.meta["permutation"] == "down":
        return _down(permute, index, context)
    if x in context.changed:
        return Miss("it is changed in place", x)
    if tuple(shape_of(x)) != tuple(shape_of(permute)):
        return Miss("it is the same for several heads", x)
    readers = [user for user in x.users if user is not permute]
    for user in readers:
        if not unmoved(user, index):
            return Miss(f"{x.name} is read by {op_name(user)} as well", user)
    moved = _first(rule.up(x, index) for rule in UP)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves an order through {name}", x)
    # They read what was permuted, of which they cannot tell.
    _replace(permute, x)
    return name, moved


def _down(permute: Node, index: Tensor, context: Context) -> tuple[str, list[Node]] | Miss:
    if len(permute.users) != 1:
        return Miss(f"{permute.name} is read {len(permute.users)} times", permute)
    (reader,) = permute.users
    if reader.op == "output" or reader in context.changed:
        return Miss("it is changed in place, or returned", reader)
    moved = _first(rule.down(reader, permute, index) for rule in DOWN)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves an order through {op_name(reader)}", reader)
    permute.graph.erase_node(permute)
    return op_name(reader), moved


def _first(results: Iterable[Moved]) -> Moved:
    return next((moved for moved in results if moved is not None), None)


def _replace(permute: Node, x: Node) -> None:
    permute.replace_all_uses_with(x)
    permute.graph.erase_node(permute)


def _repeats(many: Tensor, few: Tensor) -> tuple[int, int] | None:
    """The only dimension in which ``many`` repeats each of ``few``'s entries, and how often."""
    differs = [d for d in range(few.dim()) if many.shape[d] != few.shape[d]]
    if len(differs) != 1 or many.shape[differs[0]] % few.shape[differs[0]]:
        return None
    (dim,) = differs
    step = many.shape[dim] // few.shape[dim]
    same = many.equal(few.repeat_interleave(step, dim))
    return (dim, step) if same and few.shape[dim] > 1 else None
