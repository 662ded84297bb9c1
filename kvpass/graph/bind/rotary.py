"""Binds the cosines and sines that all layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.graph.calls import add_call
from kvpass.graph.logical_calls import AppendCall
from kvpass.ops import logical

ops = torch.ops.kvpass


class RotaryBinder:
    """One argument, one pack and one append for all layers whose keys get the same ``cos_sin``.

    Args:
        graph: with logical ops.
        positions: of its placeholders.
    """

    def __init__(self, graph: Graph, positions: dict[Node, int]) -> None:
        self._graph = graph
        self._positions = positions
        self._appends: dict[Node, list[Node]] = {}
        self._appended: dict[Node, Node] = {}
        for node in graph.find_nodes(op="call_function", target=logical.append):
            call = AppendCall.at(node)
            if call.rope is None and call.cos_sin is not None:
                self._appends.setdefault(call.cos_sin, []).append(node)
                if call.past is not None:
                    self._appended[call.past] = call.cos_sin
        # By what is appended, or the placeholder where nothing is.
        self._held: dict[Node, Node] = {}
        self._members: dict[Node, list[int]] = {}
        self._kept: dict[Node, Node] = {}
        self._packed: dict[tuple[Any, ...], Node] = {}

    def known(self, past: Node) -> Node | None:
        """The argument that holds the cosines and sines of the placeholder ``past`` already."""
        key = self._appended.get(past, past)
        if key in self._held:
            self._members[key].append(self._positions[past])
        return self._held.get(key)

    def hold(self, past: Node, inner: Node) -> None:
        """``inner`` is the argument that holds those of ``past``."""
        key = self._appended.get(past, past)
        self._held[key], self._members[key] = inner, [self._positions[past]]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """See `kvpass.graph.bind.binding.Binding.shared`."""
        return tuple(map(tuple, self._members.values()))

    def kept(self, node: Node) -> Node:
        """What the ``append`` ``node`` rotates new keys by before it stores them."""
        new = _cos_sin(node)
        if new not in self._kept:
            with self._graph.inserting_after(new):
                self._kept[new] = add_call(self._graph, ops.copy_cos_sin.default, new)
        return self._kept[new]

    def packed(self, node: Node, plan: str) -> Node:
        """What the first prompt of the ``append`` ``node`` stores."""
        new, p = _cos_sin(node), parse_plan(plan)
        # All that the op asks of a plan.
        key = (new, p.window_size, p.retention.pack_every, p.tile)
        if key not in self._packed:
            self._packed[key] = add_call(self._graph, ops.pack_cos_sin.default, new, plan)
        return self._packed[key]

    def append(self, node: Node, segment_ends: Node) -> None:
        """Appends those of the ``append`` ``node`` to a past that ends at ``segment_ends``, once:
        in front of what reads the first of the extended keys, or, in a prefill, which reads what
        it extends plain, behind what reads the last of the keys before."""
        new = _cos_sin(node)
        first = new.meta["example_value"].shape[1] <= MAX_STEP
        if node is self._appends[new][0 if first else -1]:
            args = (self._held[new], new, segment_ends, AppendCall.at(node).plan)
            add_call(self._graph, ops.append_cos_sin.default, *args)


def _cos_sin(node: Node) -> Node:
    """The cosines and sines of an ``append`` that has such."""
    found = AppendCall.at(node).cos_sin
    assert found is not None
    return found
