"""`PackedPagedCache`: transformers' paged cache with a pool of packed blocks, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvpass.format.dtypes import dtype_name
from kvpass.plan import LayerPlan
from kvpass.serving.allocator import PackedAllocator
from kvpass.serving.batch import Batch
from kvpass.serving.exact import ExactPages
from kvpass.serving.memory import PackedMemory
from kvpass.serving.pages import FULL, SLIDING, BlockPages, layers_by_type, window_of
from kvpass.serving.sliding import SlidingAllocator

_ALLOCATORS = {FULL: PackedAllocator, SLIDING: SlidingAllocator}


class PackedPagedCache(PagedAttentionCache):
    """transformers' paged cache, whose blocks are `BlockPages`.

    As many requests are active at once as ``asked`` for, None: as have room for exact tokens.

    Attributes:
        allocators: one for each type of layers; all know the same requests.
        io: the inputs of the batch that runs; see `kvpass.serving.manager`.
        moved: how many requests have been moved to the host's memory; see `kvpass.serving.offload`.
    """

    io: Any

    def __init__(
        self,
        config: Any,
        plans: Sequence[LayerPlan],
        cb_config: Any,
        device: torch.device,
        dtype: torch.dtype,
        supports_logits_to_keep: bool,
        asked: int | None,
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self._batches: dict[int, Batch] = {}
        self._computed = self._shared = self._evicted = self.moved = 0
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0
        self.read_cache_limit = None
        heads, dim = find_num_key_value_heads(config), find_head_dim(config)
        layers, page = layers_by_type(config), cb_config.page_size
        groups = {
            kind: BlockPages(
                [plans[i] for i in numbers], heads, dim, page, dtype, window_of(config, kind)
            )
            for kind, numbers in layers.items()
        }  # fmt: skip
        memory = PackedMemory(
            groups, config, cb_config, dtype=dtype,
            model_supports_logits_to_keep=supports_logits_to_keep,
        )  # fmt: skip
        exact_pages = sum(len(g.keys) * 2 * g.most_exact_pages for g in groups.values())
        requests = memory.divide(dtype.itemsize * heads * page * dim * exact_pages, asked)
        self.max_batch_tokens, self.num_sectors = memory.infer_max_batch_tokens_and_num_sectors()
        self.tokens_per_sector = memory.tokens_per_sector
        self.bytes_per_sector, self._block_bytes = memory.bytes_per_sector, memory.bytes_per_block
        self.allow_block_sharing = cb_config.allow_block_sharing
        self.cache_allocators = {}
        for i, (kind, pages) in enumerate(groups.items()):
            held = (len(pages.keys), 2, requests * pages.most_exact_pages, heads, page, dim)
            exact = ExactPages(torch.empty(held, dtype=dtype, device=device))
            self.cache_allocators[kind] = _ALLOCATORS[kind](
                i, layers[kind], pages, exact, self.allow_block_sharing
            )
        self.allocators: list[PackedAllocator] = list(self.cache_allocators.values())
        self.layer_to_allocator = {i: a for a in self.allocators for i in a.layer_indices}
        self._share_memory()
        self.use_prefix_sharing = all(a.use_block_sharing for a in self.allocators)
        self.max_tokens_read = max(a.tokens_per_page * a.num_blocks for a in self.allocators)

    def _share_memory(self) -> None:
        """Makes the pool, and has all allocators lay their blocks into it."""
        nbytes = self.num_sectors * self.bytes_per_sector
        self.cache_tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.num_blocks = nbytes // self._block_bytes
        # No trash sectors: a batch is not padded.
        self.pool = CachePool(self.num_sectors, len(self.allocators), num_reserved_sectors=0)
        for allocator in self.allocators:
            allocator.register_cache_tensor(
                self.bytes_per_sector, nbytes, self.cache_tensor, self.pool
            )

    @property
    def room(self) -> int:
        """The packed tokens that the pool holds, if each has a page of every layer."""
        return int(self.num_blocks * self.allocators[0].tokens_per_page)

    @property
    def plain_tokens(self) -> int:
        """The tokens that the bytes of the pool, exact pages included, would hold as they are."""
        exact = [(a.exact.tokens, int(a.tokens_per_page)) for a in self.allocators]
        return self.nbytes // sum(t.nbytes // (t.shape[2] * page) for t, page in exact)

    @property
    def nbytes(self) -> int:
        """The bytes of the pool, exact pages included."""
        return int(self.cache_tensor.nbytes + sum(a.exact.tokens.nbytes for a in self.allocators))

    def summary(self) -> str:
        """What the pool holds, in a line."""
        return (
            f"room for {self.room:,} packed tokens and the exact ones of "
            f"{self.allocators[0].most_requests:,} requests in the bytes of {self.plain_tokens:,} "
            f"tokens in {dtype_name(self.dtype)}"
        )

    def usage(self) -> dict[str, tuple[str, int]]:
        """What the pool holds, and has done: texts and numbers by their names, which end in
        ``_total`` where the number only grows. From any thread."""
        pool = self.pool
        free = sum(pool.count_free_blocks(a.index) * a.bytes_per_block for a in self.allocators)
        free += pool.num_free_sectors * self.bytes_per_sector
        used = self.num_blocks - free // self._block_bytes
        kept = sum(len(a.ledger.cached_blocks) for a in self.allocators)
        lengths = self.allocators[0].lengths
        return {
            "pool_bytes": ("Of the pool, exact pages included.", self.nbytes),
            "pool_tokens": ("Packed tokens that the pool has room for.", self.room),
            "pool_plain_tokens": ("Tokens as they are in the same bytes.", self.plain_tokens),
            "pool_pages": ("Packed pages, of all layers.", self.num_blocks),
            "used_pages": ("Pages with tokens, kept ones included.", used),
            "kept_pages": ("Pages kept for prompts to come.", kept),
            "requests": ("Requests in the pool.", len(lengths)),
            "held_tokens": ("Tokens of these.", sum(list(lengths.values()))),
            "computed_tokens_total": ("Tokens that the model has read.", self._computed),
            "shared_tokens_total": ("Tokens of prompts that the pool had.", self._shared),
            "evicted_pages_total": ("Kept pages that made room.", self._evicted),
            "moved_requests_total": ("Requests moved to the host's memory.", self.moved),
        }

    def batch_of(self, layer: int) -> Batch:
        """The requests in the batch, in its order, as they are stored in a layer."""
        allocator = self.layer_to_allocator[layer]
        if allocator.index not in self._batches:
            requests = [allocator.steps[x.state.request_id] for x in self.io.requests_in_batch]
            self._batches[allocator.index] = Batch.of(requests, self.device)
        return self._batches[allocator.index]

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, *_: Any
    ) -> None:
        """Called once for each request of a batch: plans its `Step`."""
        for allocator in self.allocators:
            allocator.prepare(request_id, past_length, query_length)
        self._computed += query_length
        self._batches = {}

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """The tokens of a prompt that the request begins with, since the pool has them."""
        shared = int(super().search_prefix_match(request_id, prompt_ids))
        self._shared += shared
        return shared

    def evict_cached_blocks(self) -> bool:
        """Gives up the pages that no request uses; whether there were any."""
        self._evicted += sum(len(a.ledger.cached_blocks) for a in self.allocators)
        return bool(super().evict_cached_blocks())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """What models of transformers 5.24 call. Gives the cache to their attention, which stores
        the new tokens, as older models do; ``kwargs`` are those of the attention."""
        kwargs["cache"] = self
        return key_states, value_states

    def prepare_fork_request(
        self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """The forks that there is room for, exact pages included; the caller lets others wait."""
        allocator = self.allocators[0]
        room = allocator.most_requests - len(allocator.lengths)
        forked: list[str] = super().prepare_fork_request(
            src_state, dst_req_ids[:room], copy_src_and_dst
        )
        return forked
