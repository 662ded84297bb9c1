"""Where a plan gives channels an order, cache and attention see them in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.format.channels import ChannelOrder
from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.logical_calls import AppendCall, AttentionCall, PackedCall, behind_slides
from kvpass.graph.orders import constant_node, inverse, permuted
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import VIEWS, op_name
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule
from kvpass.tensor.packed import PackedKV

_READS = VIEWS | {"repeat_interleave"}


# Where P, Pk and Pv permute the channels of each head; append' stores them in that order, and
# restore is what a cache tensor does for whom reads it outside the graph. Query heads have the
# order of the KV head that they share. The last line is the scores' sum over the channels, which
# has no order; it serves attentions over packed keys and values, and over plain ones next to an
# append.
class PermuteChannels(Rule):
    """Stores the channels of keys and values in the orders that the plan says."""

    name = "permute_channels"
    identity = (
        "append(past, new)      =  restore(append'(past, P(new)))\n"
        "unpack(packed)         =  P^-1(stored(packed))\n"
        "attention(q, K, V)     =  Pv^-1(attention(Pk(q), Pk(K), Pv(V)))"
    )
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends, to reads of what has an order, and to attentions over it."""
        append = AppendCall.of(node)
        if (append is not None and append.order is None) or node.target is logical.unpack:
            order = packed_order(node if append is not None else PackedCall.at(node).packed)
            return None if order is None else {"order": order}
        if (call := AttentionCall.of(node)) is not None:
            orders = [packed_order(n) for n in (call.keys, call.values)]
            found = {"orders": orders, "q": call.q, "reads": [], "product": node}
            return found if any(orders) else None
        site = context.sites.attention(node)
        return None if site is None else _dense(site, context)

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        if node.target is logical.append:
            return _append(node, found["order"], context)
        if node.target is logical.unpack:
            node.target = logical.stored
            if restored := _restored(node, _index(found["order"]), "stays"):
                restored.meta["left"] = Miss("what is stored is read in the model's order", node)
            return "put back into the model's order"
        keys, values = found["orders"]
        if keys is not None:
            _permute_query(found["q"], keys, found["product"], context)
        for (source, readers), order in zip(found["reads"], (keys, values), strict=False):
            if order is not None:
                moved = permuted(source, _index(order))
                source.replace_all_uses_with(moved, lambda user, known=readers: user in known)
        if values is not None:
            heads = int(node.meta["example_value"].shape[1])
            _restored(node, _index(values, heads), "down")
        return "attention in the orders of the cache"


def packed_order(packed: Node | None) -> ChannelOrder | None:
    """The order of the channels of a packed tensor, None if they are in the model's own."""
    order: ChannelOrder | None = None
    if packed is not None and packed.op == "placeholder":
        example = packed.meta.get("example_value")
        order = example.order if isinstance(example, PackedKV) else None
    elif packed is not None:
        packed = behind_slides(packed)
        past = AppendCall.at(packed).past
        order = packed.meta.get("order") if past is None else packed_order(past)
    return order


def _index(order: ChannelOrder, heads: int | None = None) -> Tensor:
    """The index of ``order`` on ``[B, heads, n, D]``; KV heads are repeated for the query heads."""
    repeats = 1 if heads is None else heads // order.heads
    return order.tensor().repeat_interleave(repeats, dim=0)[None, :, None]


def _restored(node: Node, index: Tensor, kind: str) -> Node | None:
    """What readers of ``node`` read from now on: its channels without the order ``index``."""
    restored = permuted(node, inverse(index), kind)
    if restored is node:
        return None
    node.replace_all_uses_with(restored, lambda user: user is not restored)
    return restored


# What is changed in place later on is permuted where it is read.
def _append(node: Node, order: ChannelOrder, context: Context) -> str:
    call = AppendCall.at(node)
    moved = permuted(call.new, _index(order), before=node if call.new in context.changed else None)
    device = call.new.meta["example_value"].device
    constant = constant_node(context.graph, order.tensor(), device)
    replace(call, new=moved, order=constant).write(node)
    return f"{order.heads} heads of {order.dim} channels are stored in an order"


def _permute_query(q: Node, order: ChannelOrder, reader: Node, context: Context) -> None:
    heads = int(q.meta["example_value"].shape[1])
    before = reader if q in context.changed else None
    moved = permuted(q, _index(order, heads), before=before)
    q.replace_all_uses_with(moved, lambda user: _leads_to(user, {reader}))


def _dense(site: AttentionSite, context: Context) -> Captures | Miss | None:
    """An attention over plain keys or values that are stored in an order."""
    orders = [packed_order(context.packed.get(cat)) for cat in (site.keys, site.values)]
    if site.root._erased or not any(orders):
        return None
    if site.miss is not None:
        return site.miss
    sources = _sources(site, context)
    if isinstance(sources, Miss):
        return sources
    if site.q.meta["example_value"].dim() != 4:
        return Miss("batch and heads are one dimension of the query", site.q)
    for node in (site.q, *sources, site.root):
        if node in context.changed:
            return Miss("it is changed in place", node)
    # Other attentions may read the same keys or values.
    others = {p for s in context.sites.attentions if s is not site for p in s.products}
    reads = []
    for source, end in zip((site.q, *sources), (site.products[0], *site.products), strict=True):
        readers = _readers(source, {end, *others})
        if isinstance(readers, Miss):
            return readers
        reads.append((source, [user for user in readers if _leads_to(user, {end})]))
    return {"orders": orders, "q": site.q, "reads": reads[1:], "product": site.products[0]}


def _sources(site: AttentionSite, context: Context) -> list[Node] | Miss:
    """The plain keys and values that an attention reads."""
    found = []
    for cat, product in zip((site.keys, site.values), site.products, strict=True):
        update, static = context.sites.updates.get(cat), context.sites.static(cat)
        known = {static.new} if static is not None else set()
        known |= {update.cat, update.new} if update is not None else set()
        read = [_behind_views(node, known) for node in product.all_input_nodes]
        sources = [node for node in read if node is not None]
        if len(sources) != 1:
            return Miss("it reads a buffer, which stays in the model's order", site.root)
        found += sources
    return found


def _behind_views(node: Node, known: set[Node]) -> Node | None:
    """The one of ``known`` that ``node`` is a view of, or None."""
    while node not in known:
        if op_name(node) not in _READS or not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node


def _readers(source: Node, ends: set[Node]) -> list[Node] | Miss:
    """What reads ``source`` for one of ``ends``; a `Miss` if anything else reads it."""
    found = []
    for user in source.users:
        if user.target in (logical.append, logical.permute_channels) or _is_size(user):
            continue
        if not _leads_to(user, ends):
            return Miss(f"{source.name} is read by {op_name(user)} as well", user)
        found.append(user)
    return found


def _leads_to(node: Node, ends: Collection[Node]) -> bool:
    """Whether ``node`` is one of ``ends``, or all that reads it leads there through views."""
    if node in ends:
        return True
    readers = [user for user in node.users if not _is_size(user)]
    return op_name(node) in _READS and bool(node.users) and all(_leads_to(n, ends) for n in readers)


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), int | torch.SymInt | torch.Size)
