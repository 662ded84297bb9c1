"""Binds where a prompt's tokens go, which every request brings anew."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass._torch import fresh_size
from kvpass._torch_sizes import Size, same_size, symbol_positions
from kvpass.cocktail.placement import ChunkFormat
from kvpass.errors import PlanError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.graph.bind.binding import ChunkStep
from kvpass.graph.calls import add_argument
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
        self._arguments: list[Node] = []
        self._new: Any = None
        found = graph.find_nodes(op="call_function", target=logical.reorder_chunks)
        plans = [AppendCall.at(node).parsed for node in found]
        self._plans = [plan for plan in plans if isinstance(plan, ChunkedPlan)]
        self._pasts: list[int] = []
        self.examples: tuple[Any, ...] = ()

    def scatter_index(self, call: AppendCall) -> list[Node]:
        """The arguments that say where the new tokens of ``call`` go.

        Raises:
            PlanError: if another prompt of the graph needs others, or layers have other formats.
        """
        example, past = call.new.meta["example_value"], call.past
        if not self._arguments:
            self._new, chunk_format = example, ChunkFormat.of(self._plans)
            for i in range(len(chunk_format.chunk_bits)):
                self._arguments.append(self._argument(i, example, chunk_format.tile))
            self.examples = tuple(n.meta["example_value"] for n in self._arguments)
        if past is not None:
            self._pasts.append(self._positions[past])
        sizes = all(same_size(example.shape[dim], self._new.shape[dim]) for dim in (0, 2))
        if not sizes or (self._pasts and past is None) or example.device != self._new.device:
            raise PlanError(
                f"{call.new.name} is another prompt than that of other caches of the model, or on "
                "another device: the bits of chunks are those of one. Use another recipe."
            )
        return self._arguments

    def _argument(self, segment: int, new: Any, tile: int) -> Node:
        tiles = fresh_size(self._graph, new, f"kvpass_tiles{segment}", _EXAMPLE + segment)
        example = new.new_empty((new.shape[0], tiles, tile), dtype=torch.int32)
        return add_argument(self._graph, f"kvpass_scatter_index{segment}", example)

    def step(self) -> ChunkStep | None:
        """What the callable around the graph must know."""
        if not self._arguments:
            return None
        batch, new = (Size(self._new.shape[dim], self._symbols) for dim in (0, 2))
        chunk_format, pasts = ChunkFormat.of(self._plans), tuple(self._pasts)
        return ChunkStep(chunk_format, batch, new, self._new.device, pasts)
