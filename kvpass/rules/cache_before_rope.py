"""Keys are cached before their rotary embedding."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from kvpass._torch import same_shape
from kvpass.format.rope import Rope
from kvpass.graph.analysis.reads import VIEWS
from kvpass.graph.calls import add_call
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.pattern import Captures, Miss, argument, op_name
from kvpass.rules.base import Context, Rule
from kvpass.rules.fuse_attention import erase_unread
from kvpass.rules.permutation.base import shape_of
from kvpass.rules.permutation.rotary import joins_last, rotation
from kvpass.rules.permutation.views import last_slice

# What only changes dtype or strides.
CASTS = {"contiguous", "to"}
# Products of the weights, behind which no rotary embedding is looked for.
_SOURCES = {"addmm", "linear", "matmul"}
# What may lie between them and keys that have none: nothing that could make pairs.
_POINTWISE = {"add", "div", "layer_norm", "mean", "mul", "pow", "rms_norm", "rsqrt", "sub", "var"}
# Whatever keeps equal channels equal.
_ALIKE = {"cos", "sin", "mul", "to", "contiguous", "unsqueeze", "div"}
# What every layer does anew with the model's cosines and sines.
_REPEATED = {"contiguous", "getitem", "repeat_interleave", "to", "unsqueeze"}
# What a rotary embedding is made of.
ERASABLE = {"add", "cat", "contiguous", "getitem", "mul", "neg", "reshape", "stack", "to"}
ERASABLE |= {"split", "chunk", "unsqueeze"}


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


# Where append' keeps x and the rows, one for all layers, and whatever reads the cache turns x by
# its row: rope is a function of each token alone.
class CacheBeforeRope(Rule):
    """Moves the boundary of the cache above the rotary embedding (KVQuant, section 3.2)."""

    name = "cache_before_rope"
    identity = "append(past, rope(x, cos, sin))  =  append'(past, x, rows(cos, sin))"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends whose plan says so."""
        call = AppendCall.of(node)
        if call is None or call.rows is not None or call.parsed.rope is None:
            return None
        found = rope_match(call.new)
        return found if isinstance(found, Miss) else {"rotated": found}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        call = AppendCall.at(node)
        new = call.new
        found_rope: RopeMatch = found["rotated"]
        x = found_rope.parts[0]
        if len(found_rope.parts) > 1:
            with context.graph.inserting_before(new):
                x = add_call(context.graph, torch.cat, list(found_rope.parts), dim=-1)
        if x.meta["example_value"].dtype != new.meta["example_value"].dtype:
            with context.graph.inserting_before(new):
                x = add_call(context.graph, "to", x, new.meta["example_value"].dtype)
        replace(call, new=x, rows=shared_rows(found_rope, context)).write(node)
        erase_unread(new, ERASABLE)
        return f"stored before the rotary embedding of {found_rope.rope}"


def rope_match(new: Node) -> RopeMatch | Miss | None:
    """The rotary embedding whose result the keys ``new`` ``[B, H, n, D]`` are; None if they have
    none."""
    found = last_rotated(new)
    return _none_or_miss(new) if found is None else found


def last_rotated(new: Node) -> RopeMatch | Miss | None:
    """The rotary embedding whose result the keys ``new`` ``[B, H, n, D]`` are; None if another
    operation comes last."""
    inner = _behind_casts(new)
    parts = list(argument(inner, "tensors")) if _is_join(inner) else [inner]
    parts = [_behind_casts(part) for part in parts]
    found = [rotation(part) for part in parts]
    known = [r for r in found if r is not None]
    if not known:
        return None
    if len(known) > 1:
        return Miss("the keys have several rotary embeddings", new)
    turn, halves = known[0]
    before = [part if r is None else r[0].x for part, r in zip(parts, found, strict=True)]
    start = sum(int(shape_of(part)[-1]) for part in before[: found.index(known[0])])
    channels = int(shape_of(turn.x)[-1])
    kind = "halves" if halves else "neighbours"
    tables = [_table(node, turn.x, kind) for node in (turn.cos, turn.sin)]
    for table in tables:
        if isinstance(table, Miss):
            return table
    cos, sin = (table for table in tables if isinstance(table, Node))
    rope = Rope("halves" if halves else "neighbours", start, start + channels)
    return RopeMatch(tuple(_joined(before)), cos, sin, rope)


def _behind_casts(node: Node) -> Node:
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return node


def _is_join(node: Node) -> bool:
    return op_name(node) == "cat" and joins_last(node) and rotation(node) is None


def _joined(parts: list[Node]) -> list[Node]:
    """The tensor of which ``parts`` are all channels, in order; themselves if there is none."""
    if len(parts) == 1:
        return parts
    places = [last_slice(part) for part in parts]
    sources = {part.args[0] for part in parts if part.args}
    if None in places or len(sources) != 1:
        return parts
    (source,) = sources
    channels = [int(i) for place in places for i in place or ()]
    if isinstance(source, Node) and channels == list(range(int(shape_of(source)[-1]))):
        return [source]
    return parts


def _table(node: Node, x: Node, kind: str) -> Node | Miss:
    """``node``, the cosines or sines that keys are multiplied with, if rows can be made of it."""
    shape, wanted = shape_of(node), shape_of(x)
    dims = len(shape) == len(wanted) == 4 and shape[1] == 1
    if not dims or not same_shape(shape[2:], wanted[2:]):
        return Miss("cosines and sines are no [B, 1, n, channels], which all heads share", node)
    if not _alike(node, kind):
        return Miss("the cosines of a pair are not known to be equal", node)
    return node


def _alike(node: object, kind: str) -> bool:
    """Whether the channels of every pair of ``node`` are equal."""
    if not isinstance(node, Node):
        return True
    if shape_of(node)[-1:] in ((), (1,)):
        return True
    name = op_name(node)
    if name in _ALIKE:
        return all(_alike(n, kind) for n in node.all_input_nodes)
    if name == "cat" and joins_last(node):
        tensors = argument(node, "tensors")
        return kind == "halves" and len(tensors) == 2 and tensors[0] is tensors[1]
    if name == "repeat_interleave":
        last = argument(node, "dim") in (-1, len(shape_of(node)) - 1)
        return kind == "neighbours" and last and argument(node, "repeats") == 2
    return False


def _none_or_miss(new: Node) -> Miss | None:
    """None if the keys ``new`` come from a product of weights without a rotary embedding."""
    seen, frontier = {new}, [new]
    while frontier:
        node = frontier.pop()
        name = op_name(node)
        if rotation(node) is not None or _is_join(node):
            after = op_name(new) if name != "cat" else name
            return Miss(f"{after} follows the rotary embedding of the keys", node)
        if name in _SOURCES or node.op in ("placeholder", "get_attr"):
            continue
        if name not in VIEWS | _POINTWISE:
            return Miss(f"{name} of the keys is no rotary embedding that is understood", node)
        frontier += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return None


def shared_rows(found: RopeMatch, context: Context) -> Node:
    """The rows (see `Rope`) of what was ``found``: one node for all layers that turn their keys
    alike."""
    step = 2 if found.rope.kind == "neighbours" else None
    stop = None if step else found.rope.channels // 2
    key = (_same(found.cos), _same(found.sin), found.rope.kind)
    if key not in context.rows:
        with context.graph.inserting_after(max(found.cos, found.sin)):
            pairs = (slice(None), 0, slice(None), slice(None, stop, step))
            cos = add_call(context.graph, operator.getitem, found.cos, pairs)
        with context.graph.inserting_after(cos):
            sin = add_call(context.graph, operator.getitem, found.sin, pairs)
        with context.graph.inserting_after(sin):
            context.rows[key] = add_call(context.graph, torch.cat, [cos, sin], dim=-1)
    return context.rows[key]


def _same(node: Node) -> object:
    """Equal for nodes that make the same of one node, layer by layer."""
    if op_name(node) not in _REPEATED:
        return node
    (source, *_) = node.all_input_nodes
    return op_name(node), _same(source), repr(node.args[1:]), repr(node.kwargs)
