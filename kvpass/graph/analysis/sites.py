"""Finds what there is to rewrite: cache updates, and the attention that reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from torch.fx import Graph, Node

from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.analysis.forms import find_attention
from kvpass.graph.analysis.static import StaticUpdate, static_updates
from kvpass.graph.analysis.updates import CacheUpdate, cache_update, recorded
from kvpass.graph.pattern import Miss, furthest
from kvpass.graph.spellings import op_name

# What a cache tensor is read as; unknown if by no known attention, or as both.
Role = Literal["keys", "values", "unknown"]
# How Dynamo names the model: L['self'], or of a forward with another signature L['args'][0].
_MODEL = re.compile(r"^L\['\w+'\](?:\[0\])?\.?")


@dataclass
class Sites:
    """Everything found in one graph, by cat node.

    Attributes:
        updates: the cache updates.
        attentions: the attentions over updated keys and values.
        roles: what the attentions over each cat read it as, and the first of them.
        misses: attentions that read an update but are in no known form.
        unrecognized: cache updates in no known form, with the reason.
        slices: the cat of each slice that attention reads in its place: what a sliding window
            leaves visible of a cache that keeps more, or the first prompt in a static one.
        statics: writes into static caches, by node, or why one is in no known form.
    """

    updates: dict[Node, CacheUpdate] = field(default_factory=dict)
    attentions: list[AttentionSite] = field(default_factory=list)
    roles: dict[Node, tuple[Role, AttentionSite]] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    unrecognized: dict[Node, Miss] = field(default_factory=dict)
    slices: dict[Node, Node] = field(default_factory=dict)
    statics: dict[Node, StaticUpdate | Miss] = field(default_factory=dict)

    def updated(self, node: Node) -> bool:
        """Whether ``node`` is an updated cache tensor."""
        return node in self.updates or self.static(node) is not None

    def static(self, buffer: Node) -> StaticUpdate | None:
        """The write into a static cache's buffer, if it is one."""
        for update in self.statics.values():
            if isinstance(update, StaticUpdate) and update.buffer is buffer:
                return update
        return None

    def update_roles(self) -> dict[str, Role]:
        """What each cache update is read as, by the name of its node, known in form or not."""
        read = {node: node for node in (*self.updates, *self.unrecognized)}
        for node, static in self.statics.items():
            read[node] = static.buffer if isinstance(static, StaticUpdate) else node
        return {n.name: self.roles[x][0] if x in self.roles else "unknown" for n, x in read.items()}

    def attention(self, root: Node) -> AttentionSite | None:
        """The attention whose output is ``root``."""
        return next((site for site in self.attentions if site.root is root), None)


def find_sites(graph: Graph) -> Sites:
    """Cache updates and attentions of a Dynamo graph."""
    sites = Sites()
    for node in graph.output_node().all_input_nodes:
        update = cache_update(node)
        if isinstance(update, Miss):
            sites.unrecognized[node] = update
        elif update is not None:
            update, slices = recorded(update)
            sites.updates[update.cat] = update
            sites.slices.update(dict.fromkeys(slices, update.cat))
    sites.statics = static_updates(graph)
    for static in sites.statics.values():
        if isinstance(static, StaticUpdate):
            sites.slices.update(dict.fromkeys(static.reads, static.buffer))
    for node in graph.nodes:
        found = _attention(node, sites)
        if isinstance(found, Miss):
            sites.misses.append(found)
        elif found is not None:
            sites.attentions.append(found)
            _add_role(sites, found.keys, "keys", found)
            _add_role(sites, found.values, "values", found)
    return sites


def _add_role(sites: Sites, cat: Node, role: Role, site: AttentionSite) -> None:
    known, first = sites.roles.get(cat, (role, site))
    sites.roles[cat] = (role if role == known else "unknown", first)


def _attention(node: Node, sites: Sites) -> AttentionSite | Miss | None:
    found = find_attention(node, module_path(node), sites.slices.__contains__)
    if isinstance(found, AttentionSite):
        found = replace(
            found,
            keys=sites.slices.get(found.keys, found.keys),
            values=sites.slices.get(found.values, found.values),
        )
        for name, source in (("keys", found.keys), ("values", found.values)):
            if not sites.updated(source):
                found = Miss(f"{name} come from {op_name(source)}, not from a cache update", source)
                break
    return None if isinstance(found, Miss) and not reads_update(node, sites) else found


def reads_update(node: Node, sites: Sites, reach: int = 12) -> bool:
    """Whether ``node`` depends on an updated cache tensor within ``reach`` steps."""
    frontier, seen = {node}, {node}
    for _ in range(reach):
        frontier = {i for n in frontier for i in n.all_input_nodes} - seen
        if any(sites.updated(n) for n in frontier):
            return True
        seen |= frontier
    return False


def module_path(node: Node) -> str:
    """The path of the module that ``node`` was traced in, e.g. ``model.layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return _MODEL.sub("", path)


def nearest_miss(node: Node, sites: Sites) -> Miss:
    """Why no attention was found for the update ``node``: the attempt that got furthest."""
    path = module_path(node)
    near = [m for m in sites.misses if m.node is not None and module_path(m.node) == path]
    if near:
        return furthest(near)
    return Miss("it is part of no known attention", node)
