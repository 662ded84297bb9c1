"""A prompt's tokens are stored in the order of their bits."""

from __future__ import annotations

from torch.fx import Node

from kvpass.cache.residency import MAX_STEP
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.graph.pattern import Captures, Miss
from kvpass.ops import logical
from kvpass.rules.base import Context, Rule


# attention(q, K, V, mask)  =  attention(q, P(K), P(V), P(mask))
#
# for every permutation P of the tokens: their rotary embeddings are theirs already, and a softmax
# knows no order (Cocktail, section 3.2). So what is appended of a prompt may lie in the order of
# the bits of its chunks. The bits are data: P comes with every call. Tokens of a decode step stay
# behind the exact ones.
class ReorderChunks(Rule):
    """Lets each level of a prompt be one segment."""

    name = "reorder_chunks"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to what is appended of a prompt by a plan with levels."""
        if node.target is not logical.append:
            return None
        past, new, plan, *_ = node.args
        assert isinstance(new, Node)
        levels = TensorPlan.parse(str(plan)).levels
        if not levels or (past is not None and new.meta["example_value"].shape[2] <= MAX_STEP):
            return None
        return {"plan": plan}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        node.target = logical.reorder_chunks
        return f"tokens in the order {found['plan']}, by the bits of each request"
