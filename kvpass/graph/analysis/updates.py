"""Finds cache updates: where new keys or values join those of earlier steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvpass._torch import source_name
from kvpass._torch_sizes import constant
from kvpass.graph.analysis.effects import node_number
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.tensor.packed import PackedKV

_CACHE_SOURCE = re.compile(r"\.(keys|values)$")


@dataclass(frozen=True)
class CacheUpdate:
    """``cat([past, new], dim=-2)``, which the graph returns, or the last tokens of which it does.

    Attributes:
        cat: the node.
        past: the placeholder of the packed cache tensor; None where the cache is empty, or plain.
        new: the keys or values to append, ``[B, H, n, D]``; the cat itself after a plain tensor.
        returned: what the graph returns: the cat, or its last tokens.
        window_size: how many tokens a sliding window leaves in the cache; None: all.
    """

    cat: Node
    past: Node | None
    new: Node
    returned: Node
    window_size: int | None = None


def cache_update(node: Node) -> CacheUpdate | Miss | None:
    """The update whose result ``node``, which the graph returns, is."""
    if op_name(node) != "getitem":
        return _cat_update(node)
    update, count = _cat_update(node.args[0]), last_tokens(node)
    if update is None:
        return None
    if not isinstance(count, int):
        return Miss("the cache keeps a part of the updated tensor, not its last tokens", node)
    if len(node.users) > 1:
        return Miss("the last tokens of the cache are returned, and read as well", node)
    return replace(update, returned=node, window_size=count)


def recorded(update: CacheUpdate) -> tuple[CacheUpdate, list[Node]]:
    """Assisted decoding: the cache keeps all tokens for now, attention reads what a window shows.

    Returns:
        The update with what the window keeps, and the slices that are read in place of its cat.
    """
    readers = [u for u in update.cat.users if u.op != "output" and u is not update.returned]
    counts = [last_tokens(reader) for reader in readers]
    if update.window_size is not None or update.new is update.cat or not counts or None in counts:
        return update, []
    new = update.new.meta["example_value"].shape[2]
    sizes = {constant(count - new) for count in counts if count is not None}
    window_size = sizes.pop() if len(sizes) == 1 else None
    if window_size is None or window_size < 1:
        return update, []
    return replace(update, window_size=window_size), readers


def last_tokens(node: Node) -> int | torch.SymInt | None:
    """``n`` if ``node`` is ``x[:, :, -n:, :]``."""
    tokens = token_slice(node)
    if tokens is None or tokens.stop is not None:
        return None
    start = node_number(tokens.start)
    return -start if start is not None and start < 0 else None


def token_slice(node: Node) -> slice | None:
    """``s`` if ``node`` is ``x[:, :, s, :]``, in steps of one."""
    if op_name(node) != "getitem" or not isinstance(index := node.args[1], tuple):
        return None
    parts: list[Any] = list(index)
    if len(parts) < 3 or not all(isinstance(part, slice) for part in parts):
        return None
    others = [*parts[:2], *parts[3:]]
    tokens: slice = parts[2]
    return tokens if tokens.step is None and others == [slice(None)] * len(others) else None


def _cat_update(node: Any) -> CacheUpdate | None:
    if op_name(node) != "cat" or argument(node, "dim") not in (-2, 2):
        return None
    tensors = argument(node, "tensors")
    if len(tensors) != 2 or not all(isinstance(t, Node) for t in tensors):
        return None
    past, new = tensors
    example = past.meta.get("example_value")
    if is_cache_tensor(past):
        if isinstance(example, PackedKV):
            return CacheUpdate(node, past, new, node)
        plain = isinstance(example, Tensor) and example.is_floating_point() and example.dim() == 4
        return CacheUpdate(node, None, node, node) if plain else None
    if op_name(past) == "tensor" and isinstance(example, Tensor) and example.shape == (0,):
        return CacheUpdate(node, None, new, node)
    return None


def is_cache_tensor(node: Node) -> bool:
    """Whether ``node`` is a placeholder of a cache's keys or values."""
    return node.op == "placeholder" and bool(_CACHE_SOURCE.search(source_name(node)))
