"""Where a plan gives channels a basis, cache and attention see them in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.format.channels import ChannelBasis
from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.bases import (
    basis_of,
    changes_basis,
    constant_node,
    in_basis,
    inverse,
    is_rotation,
    of_heads,
)
from kvpass.graph.logical_calls import (
    AppendCall,
    AttentionCall,
    BasisCall,
    PackedCall,
    behind_slides,
)
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import VIEWS, op_name
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule
from kvpass.tensor.packed import PackedKV

_READS = VIEWS | {"repeat_interleave"}


# Where R, Rk and Rv are orthogonal, for the channels of each head: SKVQ's orders permute them,
# others rotate them. append' stores channels so, and restore is what a cache tensor does for whom
# reads it outside the graph. Query heads have the basis of the KV head that they share. The last
# line is the scores' scalar product, which no rotation of both changes; it serves attentions over
# packed keys and values, and over plain ones next to an append.
class RotateChannels(Rule):
    """Stores the channels of keys and values in the bases that the plan says."""

    name = "rotate_channels"
    identity = (
        "append(past, new)      =  restore(append'(past, R(new)))\n"
        "unpack(packed)         =  R^-1(stored(packed))\n"
        "attention(q, K, V)     =  Rv^-1(attention(Rk(q), Rk(K), Rv(V)))"
    )
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to appends, to reads of what has a basis, and to attentions over it."""
        append = AppendCall.of(node)
        if (append is not None and append.basis is None) or node.target is logical.unpack:
            basis = packed_basis(node if append is not None else PackedCall.at(node).packed)
            return None if basis is None else {"basis": basis}
        if (call := AttentionCall.of(node)) is not None:
            bases = [packed_basis(n) for n in (call.keys, call.values)]
            found = {"bases": bases, "q": call.q, "reads": [], "product": node}
            return found if any(bases) else None
        site = context.sites.attention(node)
        return None if site is None else _dense(site, context)

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        if node.target is logical.append:
            return _append(node, found["basis"], context)
        if node.target is logical.unpack:
            node.target = logical.stored
            if restored := _restored(node, of_heads(found["basis"]), "stays"):
                restored.meta["left"] = Miss("what is stored is read in the model's basis", node)
            return "brought back to the model's basis"
        keys, values = found["bases"]
        if keys is not None:
            _rotate_query(found["q"], keys, found["product"], context)
        for (source, readers), basis in zip(found["reads"], (keys, values), strict=False):
            if basis is not None:
                moved = in_basis(source, of_heads(basis))
                source.replace_all_uses_with(moved, lambda user, known=readers: user in known)
        if values is not None:
            heads = int(node.meta["example_value"].shape[1])
            _restored(node, of_heads(values, heads), "down")
        return "attention in the bases of the cache"


def packed_basis(packed: Node | None) -> ChannelBasis | None:
    """The basis of the channels of a packed tensor, None if it is the model's own."""
    basis: ChannelBasis | None = None
    if packed is not None and packed.op == "placeholder":
        example = packed.meta.get("example_value")
        basis = example.basis if isinstance(example, PackedKV) else None
    elif packed is not None:
        packed = behind_slides(packed)
        past = AppendCall.at(packed).past
        basis = packed.meta.get("basis") if past is None else packed_basis(past)
    return basis


def _restored(node: Node, basis: Tensor, direction: str) -> Node | None:
    """What readers of ``node`` read from now on: its channels as they were before ``basis``."""
    restored = in_basis(node, inverse(basis), direction)
    if restored is node:
        return None
    node.replace_all_uses_with(restored, lambda user: user is not restored)
    return restored


# What is changed in place later on is rotated where it is read.
def _append(node: Node, basis: ChannelBasis, context: Context) -> str:
    call = AppendCall.at(node)
    before = node if call.new in context.changed else None
    moved = in_basis(call.new, of_heads(basis), before=before)
    device = call.new.meta["example_value"].device
    constant = constant_node(context.graph, basis.tensor(), device)
    replace(call, new=moved, basis=constant).write(node)
    return f"{basis.heads} heads of {basis.dim} channels are stored in a {basis.word}"


def _rotate_query(q: Node, basis: ChannelBasis, reader: Node, context: Context) -> None:
    heads = int(q.meta["example_value"].shape[1])
    before = reader if q in context.changed else None
    moved = in_basis(q, of_heads(basis, heads), before=before)
    q.replace_all_uses_with(moved, lambda user: _leads_to(user, {reader}))


# R R^T = 1 inside the scores; only what is stored needs the rotation then.
class CancelRotations(Rule):
    """Takes back the rotations of plain queries and keys that no weights could take up."""

    name = "cancel_rotations"
    identity = "attention(R(q), R(K), V)  =  attention(q, K, V)"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to a query's rotation that stays, beside that of the keys."""
        if not _left(node) or not is_rotation(queries := basis_of(node)):
            return None
        kept = set(filter(_left, context.graph.nodes)) - {node}
        for site in context.sites.attentions:
            if site.q is BasisCall.at(node).x and site.miss is None and not site.root._erased:
                product = site.products[0]
                # Keys come before values.
                read = (_behind_views(n, kept) for n in product.all_input_nodes)
                keys = next((n for n in read if n is not None), None)
                if keys is not None and _same(queries, basis_of(keys)):
                    return {"changes": (node, keys), "product": product}
        return None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        for change in found["changes"]:
            x, product = BasisCall.at(change).x, found["product"]
            change.replace_all_uses_with(x, lambda user, end=product: _leads_to(user, {end}))
            if not change.users:
                context.graph.erase_node(change)
        return "the scores are those of the model's own queries and keys"


def _left(node: Node) -> bool:
    """Whether ``node`` is a change of basis that could not be moved."""
    return "left" in node.meta and changes_basis(node)


def _same(queries: Tensor, keys: Tensor) -> bool:
    """Whether all queries that share a KV head have its rotation, and it has one."""
    if not is_rotation(keys):
        return False
    repeats = queries.shape[1] // keys.shape[1]
    return queries.equal(keys.repeat_interleave(repeats, dim=1))


def _dense(site: AttentionSite, context: Context) -> Captures | Miss | None:
    """An attention over plain keys or values that are stored in another basis."""
    bases = [packed_basis(context.packed.get(cat)) for cat in (site.keys, site.values)]
    if site.root._erased or not any(bases):
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
    return {"bases": bases, "q": site.q, "reads": reads[1:], "product": site.products[0]}


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
            return Miss("it reads a buffer, which stays in the model's basis", site.root)
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
        if user.target in (logical.append, logical.rotate_channels) or _is_size(user):
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
