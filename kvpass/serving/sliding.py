"""`SlidingAllocator`: blocks of layers whose queries see no further back than a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
        self.give_back(request_id, past_length)
        return super().needs_new_sectors(request_id, past_length, query_length)

    def _compute_blocks_needed(
        self, allocated_blocks: int, past_length: int, query_length: int
    ) -> int:
        """The blocks for more tokens, of a request that comes back without those of no use."""
        owned = allocated_blocks or self.pages.first_page(past_length)
        return int(super()._compute_blocks_needed(owned, past_length, query_length))

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """See `PackedAllocator.allocate_cache_to_request`."""
        gone = [_GONE] * self.pages.first_page(past_length)
        self.block_table.setdefault(request_id, gone)
        super().allocate_cache_to_request(request_id, past_length, query_length)

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
        gone = self.block_table[source_request_id].count(_GONE)
        with self.only_held([source_request_id]):
            found = super().fork_blocks(source_request_id, dest_request_id, past_length)
        self.block_table[dest_request_id][:0] = [_GONE] * gone
        return found

    @contextmanager
    def only_held(self, request_ids: Sequence[str]) -> Iterator[None]:
        """See `PackedAllocator.only_held`."""
        tables = {name: self.block_table[name] for name in request_ids}
        self.block_table.update({name: self._held(name) for name in request_ids})
        try:
            yield
        finally:
            self.block_table.update(tables)

    def _held(self, request_id: str) -> list[int]:
        return [block for block in self.block_table[request_id] if block != _GONE]

    def give_back(self, request_id: str, past: int) -> None:
        """Takes back what no step behind ``past`` tokens looks at."""
        table = self.block_table.get(request_id, [])
        first, gone = min(self.pages.first_page(past), len(table)), table.count(_GONE)
        if first > gone:
            blocks, table[gone:first] = table[gone:first], [_GONE] * (first - gone)
            self._begin(blocks)
            self.pool.free_blocks(self.index, blocks)
