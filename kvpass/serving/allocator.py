"""`PackedAllocator`: which blocks of a packed pool belong to which request, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

from kvpass.serving.exact import ExactPages
from kvpass.serving.pages import BlockPages


@dataclass(frozen=True)
class Step:
    """What a step of one request reads and writes, in every layer.

    Attributes:
        past, total: tokens of the request before the step and after it.
        blocks: its blocks; anything where it has given one back.
        exact: by the number of a block among those: its page of exact tokens, if any of them
            before the step is read exactly.
        kept: for tokens ``start ... end`` of the step that are kept exact: page, slot, start, end.
    """

    past: int
    total: int
    blocks: Sequence[int]
    exact: Mapping[int, int]
    kept: Sequence[tuple[int, int, int, int]]


class PackedAllocator(FullAttentionCacheAllocator):
    """transformers' allocator of blocks, for blocks of packed pages.

    A token of a request is packed as soon as the plan's retention says so, and stays exact in
    `exact` until then. Both are functions of its position alone: a block holds the same, whatever
    else is served, and can be shared.

    Attributes:
        pages: what a block consists of.
        exact: see `ExactPages`.
        lengths: tokens of each request that has a share of the exact pages.
        steps: the last step of each request.
    """

    # Of this class: the kernel of a block table reads exact tokens.
    supports_block_table = False

    def __init__(
        self,
        index: int,
        layers: Sequence[int],
        pages: BlockPages,
        exact: ExactPages,
        allow_block_sharing: bool,
    ) -> None:
        self.pages, self.exact = pages, exact
        exact.needed = self._needed
        self.most_requests = exact.tokens.shape[2] // pages.most_exact_pages
        self.lengths: dict[str, int] = {}
        self.steps: dict[str, Step] = {}
        # The most tokens that a request had when it packed what was due in a block.
        self._progress: dict[int, int] = {}
        # Of a block transformers counts the bytes only: it has one page of them here.
        self._before_cache_tensor_init(
            index=index,
            layer_indices=[layers[0]],
            tokens_per_page=pages.page_size,
            bytes_per_page=pages.nbytes,
            allow_block_sharing=allow_block_sharing,
        )
        self.layer_indices = list(layers)

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: CachePool
    ) -> None:
        """Lays the pages of all blocks into ``cache_tensor``, uint8."""
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.pages.bind(cache_tensor)

    # Requests come and go.

    def admits(self, request_id: str) -> bool:
        """Whether there are exact pages for the request."""
        return request_id in self.lengths or len(self.lengths) < self.most_requests

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """The sectors that more tokens of a request need; more than there are if it has to wait for
        another one's exact pages."""
        if not self.admits(request_id):
            return int(self.num_blocks) + 1
        return int(super().needs_new_sectors(request_id, past_length, query_length))

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """Gives the request blocks for more tokens."""
        owned = len(self.block_table.get(request_id, ()))
        super().allocate_cache_to_request(request_id, past_length, query_length)
        self.lengths.setdefault(request_id, past_length)
        self._begin(self.block_table[request_id][owned:])

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Takes all blocks of a request back; those with a known content stay for others, unless
        ``no_cache``."""
        blocks = self.block_table.get(request_id, [])
        alone = [block for block in blocks if block not in self.ledger.shared_ref_counts]
        super().free_blocks(request_id, no_cache)
        self.lengths.pop(request_id, None)
        self.steps.pop(request_id, None)
        self._begin([block for block in alone if block not in self.ledger.cached_blocks])

    def _begin(self, blocks: Sequence[int]) -> None:
        """Forgets what blocks have held."""
        for block in blocks:
            self.exact.drop(block)
            self._progress.pop(block, None)

    # Steps.

    def prepare(self, request_id: str, past: int, new: int) -> None:
        """Makes the `Step` of ``new`` tokens behind ``past`` others."""
        table, page_size, total = self.block_table[request_id], self.tokens_per_page, past + new
        exact = self.exact_pages_of(request_id, past)
        first = self.pages.packed_before(past - 1) // page_size
        self.lengths[request_id] = total
        kept = []
        for i in self._kept_pages(table, past, total):
            start, end = max(i * page_size, past), min((i + 1) * page_size, total)
            if start < end:
                kept.append((self.exact.take(table[i]), start - i * page_size, start, end))
        for block in table[first:]:
            self._progress[block] = max(total, self._progress.get(block, 0))
        self.steps[request_id] = Step(past, total, tuple(table), exact, kept)

    def give_back(self, request_id: str, past: int) -> None:
        """Takes back the blocks that no step behind ``past`` tokens looks at: here, none."""

    @contextmanager
    def only_held(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Within it the tables of requests lack the blocks given back, which are their first ones:
        here, none."""
        yield

    def exact_pages_of(self, request_id: str, tokens: int) -> dict[int, int]:
        """By the numbers of a request's blocks: their pages of those of its first ``tokens`` that
        are read exactly."""
        table = self.block_table[request_id]
        return {i: self.exact.page_of[table[i]] for i in self.pages.exact_pages(tokens)}

    def restore(self, request_id: str, exact: Tensor) -> None:
        """Notes that a request's new blocks hold its tokens again, and gives it pages of those that
        are read exactly, which held this: ``[layers, 2, n, H, page_size, D]``."""
        table, tokens = self.block_table[request_id], self.lengths[request_id]
        for block in table[self.pages.first_page(tokens) : -(-tokens // self.tokens_per_page)]:
            self._progress[block] = tokens
        for i, held in zip(self.pages.exact_pages(tokens), exact.unbind(2), strict=True):
            self.exact.tokens[:, :, self.exact.take(table[i])] = held

    def _kept_pages(self, table: Sequence[int], past: int, total: int) -> Iterator[int]:
        """The pages whose new tokens are kept exact: those attended to so after the step; and for
        requests that begin alike full ones, as long as none is taken from others."""
        needed = self.pages.exact_pages(total)
        yield from needed
        if not self.use_block_sharing:
            return
        for i in range(total // self.tokens_per_page - 1, past // self.tokens_per_page - 1, -1):
            begun = i * self.tokens_per_page < past
            if i not in needed and (table[i] in self.exact.page_of if begun else self.exact.free):
                yield i

    def _needed(self) -> set[int]:
        """The blocks with tokens that some request attends to exactly."""
        return {
            self.block_table[request_id][i]
            for request_id, tokens in self.lengths.items()
            for i in self.pages.exact_pages(tokens)
        }

    # Requests that begin alike.

    def _complete(self, block: int, number: int, tokens: int) -> bool:
        """Whether ``block``, the page of that ``number``, holds packed what a request of ``tokens``
        reads packed."""
        progress = self._progress.get(block, 0)
        end = (number + 1) * self.tokens_per_page
        return progress >= tokens or self.pages.packed_before(progress - 1) >= end

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """The blocks that hold the longest beginning of the prompt behind which a request can go
        on: its last tokens must be there exactly, too."""
        if len(self.lengths) >= self.most_requests:
            return []
        # Two tokens are left: with one the scheduler would run an empty step before it forks.
        blocks: list[int] = super().match_prefix_blocks(prompt_ids[:-1])
        while blocks:
            tokens = len(blocks) * self.tokens_per_page
            exact = [blocks[i] for i in self.pages.exact_pages(tokens)]
            if all(block in self.exact.page_of for block in exact) and all(
                self._complete(block, i, tokens) for i, block in enumerate(blocks)
            ):
                break
            blocks.pop()
        return blocks

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Lets a request begin with blocks of others."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        self.lengths[request_id] = prefix_len
        for i in self.pages.exact_pages(prefix_len):
            self.exact.touch(block_ids[i])

    def mark_complete_blocks(
        self, request_id: str, token_ids: list[int], new_new_blocks: int
    ) -> None:
        """Makes the content of the request's full blocks known. Of two blocks with the same content
        the one that more tokens are packed in stays."""
        table, parent, size = self.block_table[request_id], None, self.tokens_per_page
        bounds = range(0, self.lengths[request_id] + 1, size)
        for i, (start, end) in enumerate(pairwise(bounds)):
            known = self.ledger.block_to_hash.get(table[i])
            parent = compute_block_hash(parent, token_ids[start:end]) if known is None else known
            if known is None:
                other = self.ledger.register_new_hash(table[i], parent)
                if other is not None and not self._adopt(request_id, i, other):
                    self._replace(other, table[i], parent)

    def _adopt(self, request_id: str, number: int, other: int) -> bool:
        """Lets the request use block ``other`` instead of its own, which holds no more."""
        table, tokens = self.block_table[request_id], self.lengths[request_id]
        exact = number in self.pages.exact_pages(tokens)
        if not self._complete(other, number, tokens) or (exact and other not in self.exact.page_of):
            return False
        own = table[number]
        self.ledger.acquire(other)
        table[number] = other
        if self.ledger.release(own):
            self._begin([own])
            self.pool.free_blocks(self.index, [own])
        return True

    def _replace(self, other: int, block: int, content: int) -> None:
        """Makes ``block`` the known one of that content, instead of block ``other``."""
        del self.ledger.block_to_hash[other]
        self.ledger.hash_to_block[content] = block
        self.ledger.block_to_hash[block] = content
        if other in self.ledger.cached_blocks:
            del self.ledger.cached_blocks[other]
            self._begin([other])
            self.pool.free_blocks(self.index, [other])

    # Forks.

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Builds the blocks of a fork; the caller copies from the first ones to the second."""
        source, fresh = super().fork_blocks(source_request_id, dest_request_id, past_length)
        self.lengths[dest_request_id] = past_length
        self._begin(fresh)
        return source, fresh

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        """Copies blocks, and their exact pages if they are needed."""
        super().copy_blocks(source_block_ids, dest_block_ids)
        needed = self._needed()
        for source, target in zip(source_block_ids, dest_block_ids, strict=True):
            self._progress[target] = self._progress.get(source, 0)
            if target in needed:
                self.exact.copy(source, target)
