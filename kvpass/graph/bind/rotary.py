"""Binds the cosines and sines that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
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
    """One argument, one pack and one append for all layers whose keys get the same rows.

    Args:
        graph: with logical ops.
        positions: of its placeholders.
    """

    def __init__(self, graph: Graph, positions: dict[Node, int]) -> None:
        self._graph = graph
        self._positions = positions
        appends = graph.find_nodes(op="call_function", target=logical.append)
        self._appends: dict[Node, list[Node]] = {}
        self._rows: dict[Node, Node] = {}
        for node in appends:
            call = AppendCall.at(node)
            if call.rope is None and call.rows is not None:
                self._appends.setdefault(call.rows, []).append(node)
                if call.past is not None:
                    self._rows[call.past] = call.rows
        # By the rows that are appended, or the placeholder where none are.
        self._held: dict[Node, Node] = {}
        self._members: dict[Node, list[int]] = {}
        self._kept: dict[Node, Node] = {}
        self._packed: dict[tuple[Any, ...], Node] = {}

    def known(self, past: Node) -> Node | None:
        """The argument that holds the cosines and sines of the placeholder ``past`` already."""
        key = self._rows.get(past, past)
        if key in self._held:
            self._members[key].append(self._positions[past])
        return self._held.get(key)

    def hold(self, past: Node, inner: Node) -> None:
        """``inner`` is the argument that holds those of ``past``."""
        key = self._rows.get(past, past)
        self._held[key], self._members[key] = inner, [self._positions[past]]

    def groups(self) -> Iterator[tuple[int, ...]]:
        """See `kvpass.graph.bind.binding.Binding.shared`."""
        return map(tuple, self._members.values())

    def kept(self, node: Node) -> Node:
        """The rows by which the ``append`` ``node`` turns new keys before it stores them."""
        rows = _rows(node)
        if rows not in self._kept:
            with self._graph.inserting_after(rows):
                self._kept[rows] = add_call(self._graph, ops.keep_rows.default, rows)
        return self._kept[rows]

    def packed(self, node: Node, plan: str) -> Node:
        """The rows that the first prompt of the ``append`` ``node`` stores."""
        rows = _rows(node)
        p = parse_plan(plan)
        # All that the op asks of a plan.
        key = (rows, p.window_size, p.retention.pack_every, p.tile)
        if key not in self._packed:
            self._packed[key] = add_call(self._graph, ops.pack_rotary.default, rows, plan)
        return self._packed[key]

    def append(self, node: Node, ends: Node) -> None:
        """Appends the rows of the ``append`` ``node``, whose past ends at ``ends``, once: in front
        of what reads the first of the extended keys, or, in a prefill, which reads what it extends
        plain, behind what reads the last of the keys before."""
        rows = _rows(node)
        appends = self._appends[rows]
        first = rows.meta["example_value"].shape[1] <= MAX_STEP
        if node is appends[0 if first else -1]:
            add_call(
                self._graph,
                ops.append_rotary.default,
                self._held[rows],
                rows,
                ends,
                AppendCall.at(node).plan,
            )


def _rows(node: Node) -> Node:
    """The cosines and sines of an ``append`` that has such."""
    rows = AppendCall.at(node).rows
    assert rows is not None
    return rows
