"""Readers that are part of no fused attention get the cache decoded."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg

from kvpass._torch_sizes import symbol_node
from kvpass.errors import UnmatchedGraphError
from kvpass.format.sharded_plan import Sharded
from kvpass.graph.analysis.effects import changes
from kvpass.graph.analysis.sites import module_path, nearest_miss
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.packed_readers import is_packed, is_size, unknown_readers, unpacked
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.rules.base import Context, Rule, origin_of


class DecodeReader(Rule):
    """Decodes a packed tensor in front of readers that are part of no fused attention."""

    name = "decode_reader"
    identity = "f(packed)  =  f(unpack(packed))"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every packed tensor with such a reader."""
        readers = unknown_readers(node) if is_packed(node) else []
        if not readers:
            return None
        cat = origin_of(node)
        sites = [s for s in context.sites.attentions if cat in (s.keys, s.values)]
        reasons = [str(site.miss) for site in sites if site.miss is not None]
        reason = reasons[0] if reasons else str(nearest_miss(node, context.sites))
        return {"readers": readers, "reason": reason}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side.

        Raises:
            UnmatchedGraphError: if a reader would change the tensor in place.
        """
        for change in changes(node):
            raise UnmatchedGraphError(
                f"The packed cache tensor {node.name} is changed in place by {op_name(change)} (at "
                f"{change.name}), which is no known cache update. Begin with a new cache, and "
                "without kvpass."
            )
        for update in context.sites.updates.values():
            if update.past is node and update.cat not in context.packed:
                context.warnings.append(
                    f"the cache of {module_path(update.cat) or update.cat.name} goes back to "
                    f"{8 * update.new.meta['example_value'].dtype.itemsize} bits: "
                    f"{context.refused.get(update.cat, 'no rule applies')}"
                )
        call = AppendCall.of(node)
        plan = getattr(node.meta["example_value"], "plan", None) if call is None else call.parsed
        if isinstance(plan, Sharded):
            path = module_path(found["readers"][0]) or node.name
            context.warnings.append(
                f"the cache of {path} is gathered from all {plan.shard.size} ranks whenever this "
                f"graph runs: {found['reason']}"
            )
        with context.graph.inserting_before(found["readers"][0]):
            plain = unpacked(node)
        for reader in found["readers"]:
            reader.replace_input_with(node, plain)
        names = dict.fromkeys(map(op_name, found["readers"]))
        return f"decoded in front of {', '.join(names)}: {found['reason']}"


class ReadSize(Rule):
    """Computes what is asked of a packed tensor's size without the tensor."""

    name = "read_size"
    identity = "size(packed)  =  the symbols of the graph"
    required = False

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to every packed tensor whose size is read."""
        readers = [user for user in node.users if is_size(user)] if is_packed(node) else []
        return {"readers": readers} if readers else None

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        for reader in found["readers"]:
            _replace_size(reader)
        return "its size is computed from symbols"


def _replace_size(reader: Node) -> None:
    for part in list(reader.users):
        if op_name(part) == "getitem" and is_size(part):
            _replace_size(part)
    if reader.users:
        graph, value = reader.graph, reader.meta["example_value"]
        several = isinstance(value, tuple)
        with graph.inserting_before(reader):
            sizes = [symbol_node(graph, v) for v in (value if several else [value])]
        size = tuple(sizes) if several else sizes[0]
        for user in list(reader.users):
            user.args = map_arg(user.args, lambda n: size if n is reader else n)
            user.kwargs = map_arg(user.kwargs, lambda n: size if n is reader else n)
    reader.graph.erase_node(reader)
