"""Attention over a packed cache becomes ``kvpass.attention``."""

from __future__ import annotations

from torch.fx import Node

from kvpass.graph.pattern import Captures, Miss, op_name
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule

# What the forms of attention in `kvpass.graph.sites` are made of; none has a side effect there.
ERASABLE = {
    "add",
    "div",
    "dropout",
    "expand",
    "getitem",
    "matmul",
    "mul",
    "reshape",
    "sdpa",
    "softmax",
}
ERASABLE |= {"to", "transpose"}


# sdpa(q, repeat(K), repeat(V), mask, scale)                 =  attention(q, K, V, mask, scale)
# softmax(q @ repeat(K)^T * scale + mask) @ repeat(V)        =  attention(q, K, V, mask, scale)
#
# where K and V are packed, and repeat() is any or no repetition of KV heads for the query heads
# sharing them.
class FuseAttention(Rule):
    """Reads packed keys and values without decoding them first."""

    name = "fuse_attention"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to known attentions whose keys and values are read packed."""
        site = next((s for s in context.sites.attentions if s.root is node), None)
        if site is None:
            return None
        keys, values = (context.packed.get(cat) for cat in (site.keys, site.values))
        if keys is None or values is None or keys > node or values > node:
            return None
        if site.causal and site.q.meta["example_value"].shape[2] != 1:
            # torch's is_causal aligns the triangle top left, which hides the past.
            return Miss("is_causal with a filled cache and several new tokens", node)
        return {"site": site, "keys": keys, "values": values}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        site = found["site"]
        with context.graph.inserting_before(node):
            fused = context.graph.call_function(
                logical.attention, (site.q, found["keys"], found["values"], site.mask, site.scale)
            )
        fused.meta = {**node.meta}
        node.replace_all_uses_with(fused)
        erase_unread(node)
        mask = "no mask" if site.mask is None else "mask tensor"
        return f"{site.form} attention, {mask}, scale {site.scale:g}"


def erase_unread(node: Node) -> None:
    """Erases ``node`` if nothing reads it, then what only it had read.

    Narrower than the graph's own dead-code elimination, which takes mutating methods for pure ones.
    Every node reached here belongs to the attention that was replaced, up to what others read too.
    """
    if node.users or node.op == "placeholder" or op_name(node) not in ERASABLE:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        erase_unread(source)
