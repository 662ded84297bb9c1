"""`SlidingAllocator`: blocks of layers whose queries see no further back than a window."""

from __future__ import annotations

from kvpass.serving.allocator import PackedAllocator
from kvpass.serving.pages import SLIDING

# In the table of a request, where it has given a block back.
_GONE = -1


class SlidingAllocator(PackedAllocator):
    """A `PackedAllocator` that takes a block back as soon as no later step looks at it.

    Page ``i`` of a request still holds its tokens ``i * page_size ...``. As in transformers, no
    request begins with blocks of another, and a fork copies all of them.
    """

    supports_block_sharing = False
    layer_type = SLIDING

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """See `PackedAllocator.needs_new_sectors`, without blocks that are of no use any more."""
        self._give_back(request_id, past_length)
        return super().needs_new_sectors(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """See `PackedAllocator.free_blocks`."""
        if request_id in self.block_table:
            self.block_table[request_id] = self._held(request_id)
        super().free_blocks(request_id, no_cache)

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """The blocks that a fork needs."""
        return len(self._held(source_request_id))

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """See `PackedAllocator.fork_blocks`."""
        source = self.block_table[source_request_id]
        gone = source.count(_GONE)
        self.block_table[source_request_id] = source[gone:]
        found = super().fork_blocks(source_request_id, dest_request_id, past_length)
        self.block_table[source_request_id] = source
        self.block_table[dest_request_id][:0] = [_GONE] * gone
        return found

    def _held(self, request_id: str) -> list[int]:
        return [block for block in self.block_table[request_id] if block != _GONE]

    def _give_back(self, request_id: str, past: int) -> None:
        """Takes back what no step behind ``past`` tokens looks at."""
        table = self.block_table.get(request_id, [])
        first, gone = min(self.pages.first_page(past), len(table)), table.count(_GONE)
        if first > gone:
            blocks, table[gone:first] = table[gone:first], [_GONE] * (first - gone)
            self._begin(blocks)
            self.pool.free_blocks(self.index, blocks)
