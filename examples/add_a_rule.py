"""Teach kvpass a form of attention it does not know, with a rule of one's own.

    python -m examples.add_a_rule

The attention below repeats KV heads with ``repeat_interleave``, which no built-in rule matches:
the cache stays plain, and `explain` says why. The rule rewrites it to the form that the built-in
rules know.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from kvpass.graph.pattern import Captures, Miss, argument, op_name
from kvpass.inspect.explain import Explanation
from kvpass.rules import Context


# repeat_interleave(x, g, dim=1)  =  x[:, :, None].expand(B, H, g, T, D).reshape(B, H*g, T, D)
class ExpandHeads(kvpass.Rule):
    """Repeated KV heads, in the spelling that transformers uses."""

    name = "expand_heads"

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to ``repeat_interleave`` of heads by a fixed number."""
        if op_name(node) != "repeat_interleave" or argument(node, "dim") != 1:
            return None
        if not isinstance(repeats := argument(node, "repeats"), int):
            return Miss("heads are repeated by a tensor", node)
        return {"x": argument(node, "input"), "repeats": repeats}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """See the comment above the class."""
        graph, x, g = context.graph, found["x"], found["repeats"]
        b, h, _, d = x.meta["example_value"].shape
        every = slice(None)
        with graph.inserting_before(node):
            split = graph.call_function(operator.getitem, (x, (every, every, None)))
            grown = graph.call_method("expand", (split, -1, -1, g, -1, -1))
            flat = graph.call_method("reshape", (grown, b, h * g, -1, d))
        flat.meta = {**node.meta}
        node.replace_all_uses_with(flat)
        graph.erase_node(node)
        return f"heads repeated {g} times"


def attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention in a spelling of its own."""
    g = module.num_key_value_groups
    k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1
    )
    return out.transpose(1, 2).contiguous(), None


def generate() -> Explanation:
    """Eight tokens from a tiny random model that attends as above, and what kvpass did."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        attn_implementation="spelled_differently",
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.compile(backend="kvpass", options={"inner": "eager"})
    model.generate(torch.arange(3, 20)[None], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return kvpass.explain(model)


def main() -> None:
    """Before and after."""
    AttentionInterface.register("spelled_differently", attention)
    AttentionMaskInterface.register("spelled_differently", sdpa_mask)
    print("Without the rule:\n", generate())
    torch._dynamo.reset()
    kvpass.register_rule(ExpandHeads)
    shown = generate()
    print("\nWith the rule:\n", shown)
    print("\nThe decode graph before:\n", shown.graphs[-1].before.graph)
    print("\n... and after:\n", shown.graphs[-1].after.graph)


if __name__ == "__main__":
    main()
