"""A prompt's tokens are stored in the order of their bits."""

from __future__ import annotations

from torch.fx import Node

from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.retention import MAX_STEP
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule


# For every permutation P of the tokens: their rotary embeddings are theirs already, and a softmax
# knows no order (Cocktail, section 3.2). So what is appended of a prompt may lie in the order of
# the bits of its chunks. The bits are data: P comes with every call. Tokens of a decode step stay
# behind the exact ones.
class ReorderChunks(Rule):
    """Lets each level of a prompt be one segment."""

    name = "reorder_chunks"
    identity = "attention(q, K, V, mask)  =  attention(q, P(K), P(V), P(mask))"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to what is appended of a prompt by a `ChunkedPlan`."""
        call = AppendCall.of(node)
        if call is None or not isinstance(call.parsed, ChunkedPlan):
            return None
        if call.past is not None and call.new.meta["example_value"].shape[2] <= MAX_STEP:
            return None
        return {"plan": call.plan}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        node.target = logical.reorder_chunks
        return f"tokens in the order {found['plan']}, by the bits of each request"
