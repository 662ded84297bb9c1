"""`PackedMemory`: how much memory a packed pool gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvpass.serving.attention import QUERIES
from kvpass.serving.pages import BlockPages, sector_bytes

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

    def __init__(
        self, groups: Mapping[str, BlockPages], config: Any, cb_config: Any, **kwargs: Any
    ) -> None:
        self.groups, page = tuple(groups.values()), cb_config.page_size
        sector = sector_bytes(self.groups)
        super().__init__(
            config=config,
            cb_config=cb_config,
            bytes_per_sector=sector,
            tokens_per_sector=max(sector // pages.nbytes * page for pages in self.groups),
            bytes_per_block=sum(pages.nbytes for pages in self.groups),
            attn_types=list(groups),
            **kwargs,
        )
        self.trash_bytes = self.num_attention_masks = self.exact_bytes = 0
        heads, dim = find_num_key_value_heads(config), find_head_dim(config)
        decoded: int = 2 * heads * dim * (torch.float32.itemsize + self.cache_dtype.itemsize)
        scores = 2 * config.num_attention_heads * QUERIES * torch.float32.itemsize
        longest = int(config.max_position_embeddings)
        if cb_config.num_blocks is not None:
            longest = min(longest, cb_config.num_blocks * page)
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
        packed = sum(pages.request_bytes(self._tokens) for pages in self.groups)
        if blocks is None:
            # Exact pages take their part of the same memory.
            _, sectors = self.infer_max_batch_tokens_and_num_sectors()
            nbytes, packed = sectors * self.bytes_per_sector, packed + request_bytes
        else:
            nbytes = blocks * self.bytes_per_block
        room: int = nbytes // max(packed, 1)
        requests = max(1, min(most, room)) if asked is None else asked
        self.exact_bytes = requests * request_bytes
        return requests
