"""Binds the slots of a prompt's tokens, which every request brings anew."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass._torch import Size, derived_source, fresh_size, same_size, symbol_positions
from kvpass.cocktail.placement import ChunkFormat
from kvpass.errors import PlanError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.graph.bind.binding import ChunkStep
from kvpass.graph.logical_calls import AppendCall
from kvpass.ops import logical

# In tiles, of a segment; any number but 0 and 1 will do.
_EXAMPLE = 2


class ChunkBinder:
    """One argument for each segment, which all layers share: int32 ``[B, tiles, tile]``. How many
    tiles there are is a size of its own in each, so that buffers are as large as a request needs,
    and no other request compiles another graph.

    Args:
        graph: with logical ops.
        positions: of its placeholders.

    Attributes:
        examples: fake arguments.
    """

    def __init__(self, graph: Graph, positions: dict[Node, int]) -> None:
        self._graph = graph
        self._positions = positions
        self._symbols = symbol_positions(graph)
        self._slots: list[Node] = []
        self._new: Any = None
        found = graph.find_nodes(op="call_function", target=logical.reorder_chunks)
        plans = [AppendCall.at(node).parsed for node in found]
        self._plans = [plan for plan in plans if isinstance(plan, ChunkedPlan)]
        self._pasts: list[int] = []
        self.examples: tuple[Any, ...] = ()

    def slots(self, node: Node, new: Node) -> list[Node]:
        """The arguments that hold the slots of the tokens ``new`` of ``node``.

        Raises:
            PlanError: if another prompt of the graph needs others, or layers have other levels.
        """
        example = new.meta["example_value"]
        if not self._slots:
            self._new, levels = example, ChunkFormat.of(self._plans)
            count = len(levels.chunk_bits)
            self._slots = [self._argument(i, example, levels.tile) for i in range(count)]
            self.examples = tuple(n.meta["example_value"] for n in self._slots)
        known, past = self._new, AppendCall.at(node).past
        if past is not None:
            self._pasts.append(self._positions[past])
        alike = same_size(example.shape[0], known.shape[0])
        alike = alike and same_size(example.shape[2], known.shape[2])
        if not alike or (bool(self._pasts) and past is None) or example.device != known.device:
            raise PlanError(
                f"{new.name} is another prompt than that of other caches of the model, or on "
                "another device: the bits of chunks are those of one. Use another recipe."
            )
        return self._slots

    def _argument(self, segment: int, new: Any, tile: int) -> Node:
        last = list(self._graph.find_nodes(op="placeholder"))[-1]
        with self._graph.inserting_after(last):
            node = self._graph.placeholder(f"kvpass_slots{segment}")
        tiles = fresh_size(self._graph, new, f"kvpass_tiles{segment}", _EXAMPLE + segment)
        node.meta["example_value"] = new.new_empty((new.shape[0], tiles, tile), dtype=torch.int32)
        derived_source(self._graph, node)
        return node

    def step(self) -> ChunkStep | None:
        """What the callable around the graph must know."""
        if not self._slots:
            return None
        shape = self._new.shape
        return ChunkStep(
            ChunkFormat.of(self._plans),
            Size(shape[0], self._symbols),
            Size(shape[2], self._symbols),
            self._new.device,
            tuple(self._pasts),
        )
