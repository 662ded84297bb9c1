"""The arithmetic in an attention's mask becomes bounds that kernels skip by."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvpass.graph.calls import add_call, four_dimensional
from kvpass.graph.indices import operation
from kvpass.graph.masks import Bounds
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.writes import written
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule

_MASK, _CAUSAL, _WINDOW = 3, 6, 7
_DEFAULTS = (None, False, 0, 0.0)


# attention(q, K, V, mask)  =  attention(q, K, V, rest, causal, window)
#
# where mask = causal(i, j) & in_window(i, j) & rest, as `kvpass.graph.masks` proves, or the mask is
# added and 0 there, the least number or -inf elsewhere. With the least number both sides differ in
# rows that hide every token, so such a mask is rewritten only if every query sees itself. Scores
# are taken to be small against that number.
class MaskToBounds(Rule):
    """Leaves of a mask what is no bound: nothing, or the padding."""

    name = "mask_to_bounds"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every attention over a packed cache with a mask that is partly understood."""
        if node.target is not logical.attention or not isinstance(node.args[_MASK], Node):
            return None
        q, keys, _, mask = node.args[:4]
        assert isinstance(q, Node)
        assert isinstance(mask, Node)
        buffer = next((source for source, packed in context.packed.items() if packed is keys), None)
        static = None if buffer is None else context.sites.static(buffer)
        bounds = context.masks.bounds(mask, q, static.positions if static else None)
        return bounds if isinstance(bounds, Miss) else {"mask": mask, "bounds": bounds}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        mask, bounds = found["mask"], found["bounds"]
        args = [*node.args, *_DEFAULTS[len(node.args) - 5 :]]
        assert not args[_CAUSAL]
        assert not args[_WINDOW]
        args[_MASK] = _rest(mask, bounds, context)
        args[_CAUSAL], args[_WINDOW] = bounds.causal, bounds.window
        simple = args[5:] == list(_DEFAULTS)
        node.args = tuple(args[:5] if simple else args)
        erase_unread(mask)
        said = ["causal"] * bounds.causal + [f"window {bounds.window}"] * (bounds.window > 0)
        said += ["a mask of the rest"] if bounds.rest else [] if said else ["all is visible"]
        return ", ".join(said)


def _rest(mask: Node, bounds: Bounds, context: Context) -> Node | None:
    """The tensor that is left of ``mask``, the same node for all layers."""
    built = context.masks.built
    key = (mask, bounds.rest)
    if bounds.rest and key not in built:
        with context.graph.inserting_before(mask.next):
            parts = [_part(part, negated) for part, negated in bounds.rest]
            whole = parts[0]
            for part in parts[1:]:
                whole = add_call(context.graph, torch.logical_and, whole, part)
        built[key] = whole
    return built.get(key)


def _part(node: Node, negated: bool) -> Node:
    """``node``, or its complement, with four dimensions."""
    node = four_dimensional(node)
    return add_call(node.graph, torch.logical_not, node) if negated else node


def erase_unread(node: Node) -> None:
    """Erases ``node`` if nothing reads it, then what only it had read, up to what is no part of a
    mask's arithmetic."""
    if node._erased or node.users or operation(node) is None or written(node):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        erase_unread(source)
