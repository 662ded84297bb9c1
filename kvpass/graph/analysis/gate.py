"""A gate on attention's output that stands for sinks."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from kvpass.graph.analysis.attention_site import AttentionSite
from kvpass.graph.pattern import As, Call, Capture, Captures, Chain, Is, Link

_CAST = Link("cast", lambda x: Call("to", input=x))
_LAST = Is(lambda dim: dim == -1, "the last dimension")
_EXCESS = Call(
    "sub",
    input=Call("logsumexp", input=Capture("scores"), dim=_LAST, keepdim=Is(lambda k: not k, "no")),
    other=Call("reshape", input=Capture("parameter")),
)
_SIGMOID = Call("sigmoid", input=Chain("_", As("excess", _EXCESS), (_CAST,)))
_GATE = Chain("_", Call("unsqueeze", input=_SIGMOID, dim=_LAST), (_CAST,))


# softmax(s) @ V * sigmoid(logsumexp(s) - sink)  =  softmax([s, sink])[:-1] @ V
def with_gate(site: AttentionSite, found: Captures) -> AttentionSite:
    """``site`` with sinks, if its output is only read by a gate that does what they do."""
    gate: Captures = {"attention": site.root}
    users = list(site.root.users)
    root = Is(lambda value: value is site.root, "the attention")
    if len(users) != 1 or Call("mul", input=root, other=_GATE).match(users[0], gate):
        return site
    excess: Node = gate["excess"]
    sinks: Node = excess.all_input_nodes[1]
    shape = list(sinks.meta["example_value"].shape)
    same = gate["scores"] is found["softmax"].args[0]
    if not same or site.sinks is not None or shape != [1, site.heads, 1]:
        return site
    return replace(site, root=users[0], sinks=sinks)
