"""What a plan may do badly on a model, although its rules apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from kvpass._torch import is_subclass, is_traced, local_shard
from kvpass.graph.analysis.sites import module_path
from kvpass.graph.calls import parameter_of
from kvpass.graph.logical_calls import AppendCall
from kvpass.graph.spellings import argument, op_name
from kvpass.rules.base import Context
from kvpass.rules.cache_before_rope import RopeMatch, rope_match

# Keys of models without such biases stay below 30 or so: a larger bias, rotated with the positions,
# is most of what a group of tokens ranges over.
LARGE_BIAS = 50.0
_BETWEEN = {"contiguous", "permute", "reshape", "to", "transpose"}


def large_key_biases(context: Context, examples: Sequence[Any]) -> dict[Node, float]:
    """Cache tensors that are read as keys, behind a rotary embedding, and come from a linear layer
    with a large bias; the largest of its values.

    Args:
        context: of a graph that no rule has changed yet.
        examples: its arguments.
    """
    found = {}
    for cat, (role, _) in context.sites.roles.items():
        update = context.sites.updates.get(cat) or context.sites.static(cat)
        if role != "keys" or update is None:
            continue
        before = rope_match(update.new)
        if isinstance(before, RopeMatch) and len(before.parts) == 1:
            bias = _bias(before.parts[0], examples)
            if bias is not None and (largest := float(bias.detach().abs().max())) >= LARGE_BIAS:
                found[cat] = largest
    return found


def bias_warnings(context: Context, biases: dict[Node, float]) -> list[str]:
    """Warnings of those whose keys are rounded behind their rotary embedding, once all rules are
    applied."""
    messages = []
    for cat, largest in biases.items():
        packed = context.packed.get(cat)
        plan = None if packed is None else AppendCall.at(packed).parsed
        if plan is None or plan.rope is not None:
            continue
        if not all(codec.identity for codec in plan.codecs):
            messages.append(
                f"{module_path(cat)}: the bias of its keys is up to {largest:.0f}; rotated by the "
                "rotary embedding it is most of their range, of which few bits keep little. Store "
                "keys before RoPE: before_rope=True, or a kvquant recipe"
            )
    return messages


def _bias(keys: Node, examples: Sequence[Any]) -> Tensor | None:
    """The real bias of the linear layer that alone computes ``keys``."""
    while op_name(keys) in _BETWEEN:
        keys = keys.all_input_nodes[0]
    if op_name(keys) != "linear":
        return None
    bias = argument(keys, "bias")
    bias = parameter_of(bias) if isinstance(bias, Node) else None
    if bias is None or bias.op != "placeholder":
        return None
    real = local_shard(examples[list(keys.graph.find_nodes(op="placeholder")).index(bias)])
    known = isinstance(real, Tensor) and not is_traced(real) and not is_subclass(real)
    return real if known else None
