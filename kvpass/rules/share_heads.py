"""Dense attention reads each KV head once, not a copy of it for every query head."""

from __future__ import annotations

from torch.fx import Node

from kvpass.graph.analysis.forms import repeated
from kvpass.graph.calls import erase_unread
from kvpass.graph.pattern import Call, Capture, Captures, Miss
from kvpass.graph.spellings import argument, set_argument
from kvpass.rules.base import Context, Rule

_SHARED = Call("sdpa", key=repeated(Capture("keys")), value=repeated(Capture("values")))


# Where repeat() repeats KV heads for the query heads sharing them. For the attention that is left
# dense: that of prompts. On CPUs only: on GPUs no fast kernel of torch takes both a mask and
# enable_gqa.
class ShareHeads(Rule):
    """Neither copies nor reads KV heads more than once in a dense attention on a CPU."""

    name = "share_heads"
    identity = "sdpa(q, repeat(K), repeat(V), ...)  =  sdpa(q, K, V, ..., enable_gqa=True)"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to an SDPA on a CPU, beside an updated cache, that reads repeated heads."""
        if context.sites.attention(node) is None:
            return None
        found: Captures = {}
        if _SHARED.match(node, found) is not None:
            return None
        q, keys, values = (
            n.meta["example_value"] for n in (argument(node, "query"), *found.values())
        )
        if q.device.type != "cpu" or keys.shape[1] != values.shape[1]:
            return None
        return found

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        old = [argument(node, name) for name in ("key", "value")]
        set_argument(node, "key", found["keys"])
        set_argument(node, "value", found["values"])
        set_argument(node, "enable_gqa", True)
        for repeat in old:
            erase_unread(repeat)
        heads = found["keys"].meta["example_value"].shape[1]
        return f"{heads} KV heads are read without copies"
