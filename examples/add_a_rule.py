"""Teach kvpass a form of attention it does not know, with a rule of one's own.

    python -m examples.add_a_rule

The attention below is written with ``einsum``, which no built-in rule matches: the cache is
packed, but decoded in front of it, and `explain` says so. The rule rewrites it to the form that the
built-in rules know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import repeat_kv

import kvpass
import kvpass.backend  # makes backend="kvpass" known without installation
from kvpass.graph.pattern import Captures, Miss
from kvpass.graph.spellings import op_name
from kvpass.inspect.explain import Explanation
from kvpass.rules import Context

SCORES, VALUES = "bhqd,bhtd->bhqt", "bhqt,bhtd->bhqd"


class SpellOutEinsum(kvpass.Rule):
    """The two products of attention, in the spelling that transformers uses."""

    name = "spell_out_einsum"
    identity = (
        'einsum("bhqd,bhtd->bhqt", q, k)  =  matmul(q, k.transpose(2, 3))\n'
        'einsum("bhqt,bhtd->bhqd", w, v)  =  matmul(w, v)'
    )

    def match(self, node: Node, context: Context) -> Captures | Miss | None:
        """Applies to an ``einsum`` that is one of the two products."""
        if op_name(node) != "einsum":
            return None
        equation, *operands = node.args
        if equation not in (SCORES, VALUES):
            return Miss(f"einsum {equation} is no product of attention", node)
        return {"left": operands[0], "right": operands[1], "transposed": equation == SCORES}

    def rewrite(self, node: Node, found: Captures, context: Context) -> str:
        """Makes the right side of `identity` of its left side."""
        graph, right = context.graph, found["right"]
        with graph.inserting_before(node):
            if found["transposed"]:
                value = right.meta["example_value"]
                right = graph.call_method("transpose", (right, 2, 3))
                right.meta = {**node.meta, "example_value": value.transpose(2, 3)}
            product = graph.call_function(torch.matmul, (found["left"], right))
        product.meta = {**node.meta}
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        return f"{node.args[0]} is a matmul"


def attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention in a spelling of its own."""
    k, v = repeat_kv(k, module.num_key_value_groups), repeat_kv(v, module.num_key_value_groups)
    scores = torch.einsum(SCORES, q, k) * module.scaling
    if mask is not None:
        scores = scores + mask
    out = torch.einsum(VALUES, scores.softmax(-1), v)
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
    """Prints the report without and with the rule, and the graphs of a decode step."""
    AttentionInterface.register("spelled_differently", attention)
    AttentionMaskInterface.register("spelled_differently", eager_mask)
    print("Without the rule:\n", generate())
    torch._dynamo.reset()
    kvpass.register_rule(SpellOutEinsum)
    shown = generate()
    print("\nWith the rule:\n", shown)
    print("\nThe decode graph before:\n", shown.graphs[-1].before.graph)
    print("\n... and after:\n", shown.graphs[-1].after.graph)


if __name__ == "__main__":
    main()
