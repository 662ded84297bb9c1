"""`PackedPagedCache`: transformers' paged cache with a pool of packed blocks, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
)
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, CachePool
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvpass.format.dtypes import dtype_name
from kvpass.plan import LayerPlan
from kvpass.serving.allocator import PackedAllocator
from kvpass.serving.attention import QUERIES
from kvpass.serving.batch import Batch
from kvpass.serving.exact import ExactPages
from kvpass.serving.pages import BlockPages

# Unless the user says how many requests there are: the tokens that each of them is thought to have,
# and the part of the longest that the model takes, if that is less.
_TOKENS_OF_REQUEST, _PART_OF_LONGEST = 4096, 4


class PackedMemory(PagedAttentionMemoryHandler):
    """transformers' division of the memory, for a packed pool.

    No mask and no copy of what the batch reads is made, as with transformers' own attention: of
    one layer, a prompt's packed tokens are decoded, one request at a time.

    Attributes:
        exact_bytes: bytes of the pages of exact tokens.
    """

    def __init__(self, pages: BlockPages, config: Any, cb_config: Any, **kwargs: Any) -> None:
        super().__init__(
            config=config,
            cb_config=cb_config,
            bytes_per_sector=pages.nbytes,
            tokens_per_sector=pages.page_size,
            bytes_per_block=pages.nbytes,
            attn_types=[FULL_ATTENTION],
            **kwargs,
        )
        self.trash_bytes = self.num_attention_masks = self.exact_bytes = 0
        heads, dim = find_num_key_value_heads(config), find_head_dim(config)
        decoded: int = 2 * heads * dim * (torch.float32.itemsize + self.cache_dtype.itemsize)
        scores = 2 * config.num_attention_heads * QUERIES * torch.float32.itemsize
        longest = int(config.max_position_embeddings)
        if cb_config.num_blocks is not None:
            longest = min(longest, cb_config.num_blocks * pages.page_size)
        self._request_bytes = int(longest * (decoded + scores))
        self._tokens = min(_TOKENS_OF_REQUEST, longest // _PART_OF_LONGEST)

    @property
    def bytes_per_cache_token(self) -> int:
        """What a token takes beside the pool: transformers' read index."""
        return int(self.io_multiplier * self.num_groups) * torch.int64.itemsize

    @property
    def fixed_overhead_bytes(self) -> int:
        """What does not depend on the size of the pool: with exact tokens, and the longest request
        of one layer, decoded."""
        return int(super().fixed_overhead_bytes) + self.exact_bytes + self._request_bytes

    def divide(self, request_bytes: int, asked: int | None) -> int:
        """The number of requests that have exact pages, each ``request_bytes``, which become
        `exact_bytes`: as many as ``asked`` for, or as of some thousand tokens have room."""
        blocks, most = self.cb_config.num_blocks, self.cb_config.max_requests_per_batch
        packed = -(-self._tokens // self.tokens_per_sector) * self.bytes_per_block
        if blocks is None:
            # Exact pages take their part of the same memory.
            _, blocks = self.infer_max_batch_tokens_and_num_sectors()
            packed += request_bytes
        room: int = blocks * self.bytes_per_block // max(packed, 1)
        requests = max(1, min(most, room)) if asked is None else asked
        self.exact_bytes = requests * request_bytes
        return requests


class PackedPagedCache(PagedAttentionCache):
    """transformers' paged cache, whose blocks are `BlockPages`.

    As many requests are active at once as ``asked`` for, None: as have room for exact tokens.

    Attributes:
        allocator: the one for all layers.
        io: the inputs of the batch that runs; see `kvpass.serving.manager`.
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
        self._batch: Batch | None = None
        self._computed = self._shared = self._evicted = 0
        self.max_blocks_per_request = self.max_decode_fast_path_length = 0
        self.read_cache_limit = None
        heads, dim, page = (
            find_num_key_value_heads(config),
            find_head_dim(config),
            cb_config.page_size,
        )
        pages = BlockPages(plans, heads, dim, page, dtype)
        memory = PackedMemory(
            pages, config, cb_config, dtype=dtype,
            model_supports_logits_to_keep=supports_logits_to_keep,
        )  # fmt: skip
        exact_shape = (len(plans), 2, pages.most_exact_pages, heads, page, dim)
        requests = memory.divide(dtype.itemsize * torch.Size(exact_shape).numel(), asked)
        self.max_batch_tokens, self.num_blocks = memory.infer_max_batch_tokens_and_num_sectors()
        self.num_sectors, self.tokens_per_sector = self.num_blocks, page
        self.bytes_per_sector = pages.nbytes
        self.cache_tensor = torch.empty(
            self.num_blocks * pages.nbytes, dtype=torch.uint8, device=device
        )
        shape = (len(plans), 2, requests * pages.most_exact_pages, heads, page, dim)
        exact = ExactPages(torch.empty(shape, dtype=dtype, device=device))
        self.allow_block_sharing = cb_config.allow_block_sharing
        self.allocator = PackedAllocator(pages, exact, len(plans), self.allow_block_sharing)
        self.cache_allocators = {FULL_ATTENTION: self.allocator}
        self.layer_to_allocator = dict.fromkeys(range(len(plans)), self.allocator)
        # No trash sectors: a batch is not padded.
        self.pool = CachePool(self.num_sectors, 1, num_reserved_sectors=0)
        self.allocator.register_cache_tensor(
            pages.nbytes, self.cache_tensor.numel(), self.cache_tensor, self.pool
        )
        self.use_prefix_sharing = self.allocator.use_block_sharing
        self.max_tokens_read = self.num_blocks * page

    @property
    def plain_tokens(self) -> int:
        """The tokens that the bytes of the pool, exact pages included, would hold as they are."""
        exact = self.allocator.exact.tokens
        token = exact.nbytes // (exact.shape[2] * int(self.allocator.tokens_per_page))
        return self.nbytes // token

    @property
    def nbytes(self) -> int:
        """The bytes of the pool, exact pages included."""
        return int(self.cache_tensor.nbytes + self.allocator.exact.tokens.nbytes)

    def summary(self) -> str:
        """What the pool holds, in a line."""
        return (
            f"room for {self.max_tokens_read:,} packed tokens and the exact ones of "
            f"{self.allocator.most_requests:,} requests in the bytes of {self.plain_tokens:,} "
            f"tokens in {dtype_name(self.dtype)}"
        )

    def usage(self) -> dict[str, tuple[str, int]]:
        """What the pool holds, and has done: texts and numbers by their names, which end in
        ``_total`` where the number only grows. From any thread."""
        allocator, pool = self.allocator, self.pool
        free = pool.num_free_sectors + pool.count_free_blocks(allocator.index)
        return {
            "pool_bytes": ("Of the pool, exact pages included.", self.nbytes),
            "pool_tokens": ("Packed tokens that the pool has room for.", self.max_tokens_read),
            "pool_plain_tokens": ("Tokens as they are in the same bytes.", self.plain_tokens),
            "pool_pages": ("Packed pages, of all layers.", self.num_blocks),
            "used_pages": ("Pages with tokens, kept ones included.", self.num_blocks - free),
            "kept_pages": ("Pages kept for prompts to come.", len(allocator.ledger.cached_blocks)),
            "requests": ("Requests in the pool.", len(allocator.lengths)),
            "held_tokens": ("Tokens of these.", sum(list(allocator.lengths.values()))),
            "computed_tokens_total": ("Tokens that the model has read.", self._computed),
            "shared_tokens_total": ("Tokens of prompts that the pool had.", self._shared),
            "evicted_pages_total": ("Kept pages that made room.", self._evicted),
        }

    @property
    def batch(self) -> Batch:
        """The requests in the batch, in its order."""
        if self._batch is None:
            steps = self.allocator.steps
            requests = [steps[x.state.request_id] for x in self.io.requests_in_batch]
            self._batch = Batch.of(requests, self.device)
        return self._batch

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, *_: Any
    ) -> None:
        """Called once for each request of a batch: plans its `Step`."""
        self.allocator.prepare(request_id, past_length, query_length)
        self._computed += query_length
        self._batch = None

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """The tokens of a prompt that the request begins with, since the pool has them."""
        shared = int(super().search_prefix_match(request_id, prompt_ids))
        self._shared += shared
        return shared

    def evict_cached_blocks(self) -> bool:
        """Gives up the pages that no request uses; whether there were any."""
        kept = len(self.allocator.ledger.cached_blocks)
        self._evicted += kept
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
        room = self.allocator.most_requests - len(self.allocator.lengths)
        forked: list[str] = super().prepare_fork_request(
            src_state, dst_req_ids[:room], copy_src_and_dst
        )
        return forked
