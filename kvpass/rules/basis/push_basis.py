"""Changes of basis move through the graph, until the weights have taken them up."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Node

from kvpass.graph.bases import basis_of, changes_basis, is_identity, is_rotation
from kvpass.graph.logical_calls import BasisCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.basis import arithmetic, views
from kvpass.rules.basis.base import PushDown, PushUp, shape_of
from kvpass.rules.basis.rotary import rotary_up
from kvpass.rules.basis.weights import LAYERS, linear_down, linear_up

UP: list[PushUp] = [views.compose_up, arithmetic.elementwise_up, views.transpose_up]
UP += [views.reshape_up, views.slice_up, views.cat_up, rotary_up, arithmetic.scaled_up, linear_up]
DOWN: list[PushDown] = [arithmetic.elementwise_down, views.transpose_down, views.reshape_down]
DOWN += [linear_down]


# For every f in `kvpass.rules.basis`.
class PushBasis(Rule):
    """Moves changes of basis up to the weights that compute the channels, or down to those that
    read them, as far as each can go."""

    name = "push_basis"
    identity = "R(f(x))  =  f(R(x))\nf(R(x))  =  R(f(x))"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every change that is to move."""
        movable = changes_basis(node) and node.meta["direction"] != "stays"
        return {} if movable and "left" not in node.meta else None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        waiting, passed = [node], []
        while waiting:
            rotate = waiting.pop()
            if rotate._erased:
                continue
            rotate.meta.pop("left", None)
            moved = _push(rotate, context)
            if isinstance(moved, Miss):
                rotate.meta["left"] = moved
            else:
                passed.append(moved[0])
                # Of those that could not be moved before, fewer may be read by others now.
                waiting += moved[1]
        return f"through {', '.join(passed)}" if passed else "not moved"


def _push(rotate: Node, context: Context) -> tuple[str, list[Node]] | Miss:
    """Moves one change through one operation.

    Returns:
        The operation's name, and the changes that took its place.
    """
    x, basis = BasisCall.at(rotate).x, basis_of(rotate)
    if is_identity(basis):
        _replace(rotate, x)
        return "nothing", []
    if rotate.meta["direction"] == "down":
        return _down(rotate, basis, context)
    if x in context.changed:
        return Miss("it is changed in place", x)
    if tuple(shape_of(x)) != tuple(shape_of(rotate)):
        return Miss("it is the same for several heads", x)
    for user in x.users:
        if user is not rotate and not views.unmoved(user, basis):
            return Miss(f"{x.name} is read by {op_name(user)} as well", user)
    name = op_name(x)
    moved = next((m for push in UP if (m := push(x, basis)) is not None), None)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves {_word(basis)} through {name}", x)
    # To its other readers the basis makes no difference.
    _replace(rotate, x)
    return name, moved


def _word(basis: Tensor) -> str:
    return "a rotation" if is_rotation(basis) else "an order"


def _down(rotate: Node, basis: Tensor, context: Context) -> tuple[str, list[Node]] | Miss:
    if len(rotate.users) != 1:
        return Miss(f"{rotate.name} is read {len(rotate.users)} times", rotate)
    (reader,) = rotate.users
    # A layer's own result stays as it is, also where other processes' are added to it in place.
    changed = reader in context.changed and op_name(reader) not in LAYERS
    if reader.op == "output" or changed:
        return Miss("it is changed in place, or returned", reader)
    results = (push(reader, rotate, basis) for push in DOWN)
    moved = next((m for m in results if m is not None), None)
    if isinstance(moved, Miss) or moved is None:
        return moved or Miss(f"no rule moves {_word(basis)} through {op_name(reader)}", reader)
    rotate.graph.erase_node(rotate)
    return op_name(reader), moved


def _replace(rotate: Node, x: Node) -> None:
    rotate.replace_all_uses_with(x)
    rotate.graph.erase_node(rotate)


class BasisLeft(Rule):
    """Says which changes of basis stay in the graph, and why. It changes nothing."""

    name = "basis_left"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """A `Miss` for every change that could not be moved into weights."""
        left = node.meta.get("left")
        if left is None:
            return None
        done = "rotated" if is_rotation(basis_of(node)) else "gathered"
        return Miss(f"channels are {done} in every call: {left}")

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
        if not changes_basis(node) or node.meta["direction"] != "stays":
            return None
        cos_sin, basis = BasisCall.at(node).x, basis_of(node)
        if is_rotation(basis):
            return None
        for other in cos_sin.users:
            if changes_basis(other) and other is not node:
                repeats = _repeats(basis_of(other), basis)
                if repeats is not None and len(shape_of(cos_sin)) == basis.dim():
                    return {"other": other, "dim": repeats[0], "step": repeats[1]}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        other, dim, step = found["other"], found["dim"], found["step"]
        every = (*[slice(None)] * dim, slice(None, None, step))
        with context.graph.inserting_after(max(other, node)):
            part = context.graph.call_function(operator.getitem, (other, every))
        part.meta = {**node.meta}
        del part.meta["direction"]
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
