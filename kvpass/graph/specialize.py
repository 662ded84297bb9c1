"""Numbers that Dynamo hands over as variable (``dynamic=True``) and that rules have to know become
numbers again, with a guard on each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph

from kvpass._torch import source_name
from kvpass._torch_sizes import constant
from kvpass.graph.spellings import op_name
from kvpass.tensor.packed import PackedKV

_ATTENTION = ("sdpa", "softmax")
# What transformers' cache layers are made with; their other numbers count tokens.
_SIZES = ("sliding_window", "max_cache_len")


def specialize(graph: Graph) -> None:
    """Fixes the scales of attention, the heads and channels of cache tensors, and their windows;
    batch and tokens stay as they are."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, PackedKV):
            _fix_packed(value)
        elif isinstance(value, torch.SymInt) and source_name(node).endswith(_SIZES):
            int(value)
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and (number := constant(value)) is not None:
            node.replace_all_uses_with(number)
    # Other graphs keep their floats, which may change in every call.
    if any(op_name(node) in _ATTENTION for node in graph.nodes):
        _fix_floats(graph)


def _fix_packed(x: PackedKV) -> None:
    _fix_sizes(x, 0, 2)
    _fix_sizes(x.segment_ends, 0)


def _fix_sizes(x: Tensor, *free: int) -> None:
    for dim, size in enumerate(x.shape):
        if dim not in free:
            int(size)


def _fix_floats(graph: Graph) -> None:
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, torch.SymFloat):
            if node.users:
                node.replace_all_uses_with(float(value))
            graph.erase_node(node)
