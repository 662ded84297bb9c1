"""Keys are cached before their rotary embedding."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from kvpass._torch_sizes import same_shape
from kvpass.format.rope import Rope
from kvpass.graph.calls import add_call, erase_unread
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import VIEWS, argument, op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.basis.base import is_last, shape_of
from kvpass.rules.basis.rotary import Rotation, rotation
from kvpass.rules.basis.views import joins_last, last_slice

# Products of the weights, behind which no rotary embedding is looked for.
_SOURCES = {"addmm", "linear", "matmul"}
# What may lie between them and keys that have none: nothing that could make pairs.
_POINTWISE = {"add", "div", "layer_norm", "mean", "mul", "pow", "rms_norm", "rsqrt", "sub", "var"}
# Whatever keeps equal channels equal.
_ALIKE = {"cos", "sin", "mul", "to", "contiguous", "unsqueeze", "div"}
# What every layer does anew with the model's cosines and sines.
_REPEATED = {"contiguous", "getitem", "repeat_interleave", "to", "unsqueeze"}


@dataclass(frozen=True)
class RopeMatch:
    """Keys behind their rotary embedding.

    Attributes:
        parts: the channels of the keys before it, to be joined; one, if they are a tensor.
        cos, sin: ``[B or 1, 1, n, channels]``.
        rope: what it does.
    """

    parts: tuple[Node, ...]
    cos: Node
    sin: Node
    rope: Rope


# Where append' keeps x and cos_sin, one for all layers, and whatever reads the cache rotates x by
# that: rope is a function of each token alone.
class CacheBeforeRope(Rule):
    """Moves the boundary of the cache above the rotary embedding (KVQuant, section 3.2)."""

    name = "cache_before_rope"
    identity = "append(past, rope(x, cos, sin))  =  append'(past, x, cos_sin)"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends whose plan says so."""
        call = AppendCall.of(node)
        if call is None or call.cos_sin is not None or call.parsed.rope is None:
            return None
        found = rope_match(call.new)
        return found if isinstance(found, Miss) else {"rope": found}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        call, match = AppendCall.at(node), found["rope"]
        x, dtype = match.parts[0], call.new.meta["example_value"].dtype
        with context.graph.inserting_before(call.new):
            if len(match.parts) > 1:
                x = add_call(context.graph, torch.cat, list(match.parts), dim=-1)
            if x.meta["example_value"].dtype != dtype:
                x = add_call(context.graph, "to", x, dtype)
        replace(call, new=x, cos_sin=shared_cos_sin(match, context)).write(node)
        erase_unread(call.new)
        return f"stored before the rotary embedding of {match.rope}"


def rope_match(new: Node) -> RopeMatch | Miss | None:
    """The rotary embedding whose result the keys ``new`` ``[B, H, n, D]`` are; None if they come
    from a product of weights without one."""
    if (found := last_rotated(new)) is not None:
        return found
    seen, frontier = {new}, [new]
    while frontier:
        node = frontier.pop()
        name = op_name(node)
        if rotation(node) is not None or _joins_channels(node):
            after = op_name(new) if name != "cat" else name
            return Miss(f"{after} follows the rotary embedding of the keys", node)
        if name in _SOURCES or node.op in ("placeholder", "get_attr"):
            continue
        if name not in VIEWS | _POINTWISE:
            return Miss(f"{name} of the keys is no rotary embedding that is understood", node)
        frontier += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return None


def last_rotated(new: Node) -> RopeMatch | Miss | None:
    """The rotary embedding whose result the keys ``new`` ``[B, H, n, D]`` are; None if another
    operation comes last."""
    inner = behind_casts(new)[-1]
    parts = argument(inner, "tensors") if _joins_channels(inner) else [inner]
    parts = [behind_casts(part)[-1] for part in parts]
    found = [rotation(part) for part in parts]
    known = [r for r in found if r is not None]
    if not known:
        return None
    if len(known) > 1:
        return Miss("the keys have several rotary embeddings", new)
    (rotary,) = known
    before = [part if r is None else r.x for part, r in zip(parts, found, strict=True)]
    if miss := _table_miss(rotary.cos, rotary) or _table_miss(rotary.sin, rotary):
        return miss
    start = sum(int(shape_of(part)[-1]) for part in before[: found.index(rotary)])
    rope = Rope(rotary.kind, start, start + int(shape_of(rotary.x)[-1]))
    return RopeMatch(tuple(_joined(before)), rotary.cos, rotary.sin, rope)


def behind_casts(node: Node) -> list[Node]:
    """``node`` and what it is in other dtypes and strides, down to what computes it."""
    found = [node]
    while op_name(found[-1]) in ("contiguous", "to"):
        found.append(found[-1].all_input_nodes[0])
    return found


def _joins_channels(node: Node) -> bool:
    return op_name(node) == "cat" and joins_last(node)


def _joined(parts: list[Node]) -> list[Node]:
    """The tensor of which ``parts`` are all channels, in order; themselves if there is none."""
    slices = [last_slice(part) for part in parts]
    if len(parts) == 1 or None in slices or len({part.args[0] for part in parts}) != 1:
        return parts
    source = argument(parts[0], "input")
    channels = [channel for chosen in slices for channel in chosen or ()]
    return [source] if channels == list(range(int(shape_of(source)[-1]))) else parts


def _table_miss(node: Node, rotary: Rotation) -> Miss | None:
    """Why ``node``, the cosines or sines of a rotary embedding, cannot be stored for all heads."""
    shape, wanted = shape_of(node), shape_of(rotary.x)
    dims = len(shape) == len(wanted) == 4 and shape[1] == 1
    if not dims or not same_shape(shape[2:], wanted[2:]):
        return Miss("cosines and sines are no [B, 1, n, channels], which all heads share", node)
    if not _alike(node, rotary.kind):
        return Miss("the cosines of a pair are not known to be equal", node)
    return None


def _alike(node: Node, kind: str) -> bool:
    """Whether the channels of every pair of ``node`` are equal."""
    if shape_of(node)[-1:] in ((), (1,)):
        return True
    name = op_name(node)
    if name in _ALIKE:
        return all(_alike(n, kind) for n in node.all_input_nodes)
    if name == "cat" and joins_last(node):
        tensors = argument(node, "tensors")
        return kind == "halves" and len(tensors) == 2 and tensors[0] is tensors[1]
    twice = name == "repeat_interleave" and argument(node, "repeats") == 2
    return twice and kind == "neighbours" and is_last(argument(node, "dim"), node)


def shared_cos_sin(found: RopeMatch, context: Context) -> Node:
    """The ``cos_sin`` (see `Rope`) of what was ``found``: one node for all layers that rotate their
    keys alike."""
    step = 2 if found.rope.kind == "neighbours" else None
    stop = None if step else found.rope.channels // 2
    key = (_same(found.cos), _same(found.sin), found.rope.kind)
    if key not in context.cos_sin:
        pairs = (slice(None), 0, slice(None), slice(None, stop, step))
        with context.graph.inserting_before(max(found.cos, found.sin).next):
            halves = [
                add_call(context.graph, operator.getitem, table, pairs)
                for table in (found.cos, found.sin)
            ]
            context.cos_sin[key] = add_call(context.graph, torch.cat, halves, dim=-1)
    return context.cos_sin[key]


def _same(node: Node) -> object:
    """Equal for nodes that make the same of one node, layer by layer."""
    if op_name(node) not in _REPEATED:
        return node
    (source, *_) = node.all_input_nodes
    return op_name(node), _same(source), repr(node.args[1:]), repr(node.kwargs)
