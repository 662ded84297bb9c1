"""The keys of a step get their rotary embedding where they are appended."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from kvpass._torch_sizes import same_shape
from kvpass.format.retention import MAX_STEP
from kvpass.graph.calls import erase_unread
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.basis.base import shape_of
from kvpass.rules.cache_before_rope import RopeMatch, behind_casts, last_rotated, shared_cos_sin


# Where the append rotates x by cos_sin, one for all layers, in float32, and rounds once, which is
# what Inductor makes of the model's rope. For steps of up to MAX_STEP tokens: what a longer one
# appends is read by its exact attention as well.
class FuseRopeAppend(Rule):
    """Rotates the keys of a step in the kernel that stores them."""

    name = "fuse_rope_append"
    identity = "append(past, rope(x, cos, sin))  =  append(past, x, cos_sin, rope)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends to a cache that holds keys behind their rotary embedding."""
        call = AppendCall.of(node)
        if call is None or call.past is None or call.cos_sin is not None:
            return None
        new = call.new
        if shape_of(new)[2] > MAX_STEP:
            return None
        found = last_rotated(new)
        if isinstance(found, Miss) and call.basis is not None:
            return Miss("cosines and sines follow the order of the stored channels", new)
        if not isinstance(found, RopeMatch):
            return found
        if len(found.parts) > 1:
            return Miss("the keys before their rotary embedding are several tensors", new)
        x = _narrow(found.parts[0], new)
        changed = next((n for n in (x, found.cos, found.sin) if n in context.changed), None)
        if changed is not None:
            return Miss("it is changed in place", changed)
        return _miss(x, found, new, node) or {"x": x, "rope": found}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        call, match = AppendCall.at(node), found["rope"]
        cos_sin = shared_cos_sin(match, context)
        replace(call, new=found["x"], cos_sin=cos_sin, rope=str(match.rope)).write(node)
        erase_unread(call.new)
        return f"rotated by {match.rope} where they are stored"


def _narrow(x: Node, new: Node) -> Node:
    """``x`` before it was widened to float32, as kernels do, if that has the dtype of ``new``."""
    casts = behind_casts(x)
    exact = all(_dtype(node) in (_dtype(new), torch.float32) for node in casts)
    return casts[-1] if exact and _dtype(casts[-1]) == _dtype(new) else x


def _miss(x: Node, found: RopeMatch, new: Node, append: Node) -> Miss | None:
    """Why the rotated keys ``new`` are still needed: others read them, or they are not ``x``
    rotated in float32 and rounded once."""
    casts = behind_casts(new)
    for user in (user for node in casts for user in node.users):
        if user is not append and user not in casts:
            return Miss(f"the rotated keys are read by {op_name(user)} as well", user)
    if _dtype(x) != _dtype(new) or not same_shape(shape_of(x), shape_of(new)):
        return Miss("the keys change their dtype or shape when they are rotated", new)
    for node in (*casts, found.cos, found.sin):
        if _dtype(node) not in (_dtype(new), torch.float32):
            return Miss(f"the keys are rotated in {_dtype(node)}", node)
    return None


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["example_value"].dtype
    return dtype
