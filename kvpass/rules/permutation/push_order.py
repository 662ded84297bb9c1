"""Permutations of channels move through the graph, until the weights have taken them up."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Node

from kvpass.graph.logical_calls import PermuteCall
from kvpass.graph.orders import index_of, is_identity, is_permutation
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.permutation import arithmetic, views
from kvpass.rules.permutation.base import PushDown, PushUp, shape_of
from kvpass.rules.permutation.rotary import rotary_up
from kvpass.rules.permutation.weights import linear_down, linear_up

UP: list[PushUp] = [views.compose_up, arithmetic.elementwise_up, views.transpose_up]
UP += [views.reshape_up, views.slice_up, views.cat_up, rotary_up, arithmetic.scaled_up, linear_up]
DOWN: list[PushDown] = [arithmetic.elementwise_down, views.transpose_down, views.reshape_down]
DOWN += [linear_down]


# For every f in `kvpass.rules.permutation`.
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
            moved = _push(permute, context)
            if isinstance(moved, Miss):
                permute.meta["left"] = moved
            else:
                passed.append(moved[0])
                # Of those that could not be moved before, fewer may be read by others now.
                waiting += moved[1]
        return f"through {', '.join(passed)}" if passed else "not moved"


def _push(permute: Node, context: Context) -> tuple[str, list[Node]] | Miss:
    """Moves one permutation through one operation.

    Returns:
        The operation's name, and the permutations that took its place.
    """
    x, index = PermuteCall.at(permute).x, index_of(permute)
    if is_identity(index):
        _replace(permute, x)
        return "nothing", []
    if permute.meta["permutation"] == "down":
        return _down(permute, index, context)
    if x in context.changed:
        return Miss("it is changed in place", x)
    if tuple(shape_of(x)) != tuple(shape_of(permute)):
        return Miss("it is the same for several heads", x)
    for user in x.users:
        if user is not permute and not views.unmoved(user, index):
            return Miss(f"{x.name} is read by {op_name(user)} as well", user)
    name = op_name(x)
    moved = next((m for push in UP if (m := push(x, index)) is not None), None)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves an order through {name}", x)
    # To its other readers the order makes no difference.
    _replace(permute, x)
    return name, moved


def _down(permute: Node, index: Tensor, context: Context) -> tuple[str, list[Node]] | Miss:
    if len(permute.users) != 1:
        return Miss(f"{permute.name} is read {len(permute.users)} times", permute)
    (reader,) = permute.users
    if reader.op == "output" or reader in context.changed:
        return Miss("it is changed in place, or returned", reader)
    results = (push(reader, permute, index) for push in DOWN)
    moved = next((m for m in results if m is not None), None)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves an order through {op_name(reader)}", reader)
    permute.graph.erase_node(permute)
    return op_name(reader), moved


def _replace(permute: Node, x: Node) -> None:
    permute.replace_all_uses_with(x)
    permute.graph.erase_node(permute)


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
        """Applies where the same cosines or sines are permuted for more heads, too."""
        if not is_permutation(node) or node.meta["permutation"] != "stays":
            return None
        cos_sin, index = PermuteCall.at(node).x, index_of(node)
        for other in cos_sin.users:
            if is_permutation(other) and other is not node:
                repeats = _repeats(index_of(other), index)
                if repeats is not None and len(shape_of(cos_sin)) == index.dim():
                    return {"other": other, "dim": repeats[0], "step": repeats[1]}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        other, dim, step = found["other"], found["dim"], found["step"]
        index = (*[slice(None)] * dim, slice(None, None, step))
        with context.graph.inserting_after(max(other, node)):
            part = context.graph.call_function(operator.getitem, (other, index))
        part.meta = {**node.meta}
        del part.meta["permutation"]
        _replace(node, part)
        return f"shared by {step} heads"


def _repeats(many: Tensor, few: Tensor) -> tuple[int, int] | None:
    """The only dimension in which ``many`` repeats each of ``few``'s entries, and how often."""
    differs = [d for d in range(few.dim()) if many.shape[d] != few.shape[d]]
    if len(differs) != 1 or many.shape[differs[0]] % few.shape[differs[0]]:
        return None
    (dim,) = differs
    step = many.shape[dim] // few.shape[dim]
    same = many.equal(few.repeat_interleave(step, dim))
    return (dim, step) if same and few.shape[dim] > 1 else None
