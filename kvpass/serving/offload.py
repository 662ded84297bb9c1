"""`PackedOffloading`: requests that wait for room in the host's memory, packed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from kvpass.serving.allocator import PackedAllocator
from kvpass.serving.cache import PackedPagedCache


class PackedOffloading(OffloadingManager):
    """transformers' manager of requests that lose their blocks, for packed ones.

    As many as have room in the host's memory are moved there as they are, with their exact tokens;
    others begin anew.
    """

    def __init__(
        self,
        cache: PackedPagedCache,
        scheduler: Any,
        space: float | None,
        safety_threshold: float,
        stream: Any,
        distributed_helper: Any,
    ) -> None:
        """
        Args:
            space: GiB of the host's memory, exact tokens included; None: `safety_threshold` of it.
            stream: what moves is in order with all else that is done there.
        """
        # Without memory: transformers pins it, for which there must be a GPU.
        super().__init__(cache, scheduler, 0.0, 1.0, stream, distributed_helper)
        self._allocators: Sequence[PackedAllocator] = cache.allocators
        # By request, for each allocator: the exact pages of those that may be moved, and what those
        # of moved ones held.
        self._pages: dict[str, list[list[int]]] = {}
        self._exact: dict[str, list[Tensor]] = {}
        if space == 0:
            return
        self._most = self._allocators[0].most_requests
        exact = sum(allocator.exact.tokens.nbytes for allocator in self._allocators)
        sectors = self._compute_num_cpu_sectors(space, safety_threshold)
        sectors -= -(-exact // cache.bytes_per_sector)
        if sectors < 1:
            warnings.warn(
                f"kvpass: cpu_offload_space={space} holds no page beside the exact tokens of "
                f"{self._most:,} requests ({exact / 2**30:.3g} GiB): no request "
                "is moved to the host's memory.",
                stacklevel=2,
            )
            return
        self._num_cpu_sectors = sectors
        self._cpu_tensor = torch.empty(
            sectors * cache.bytes_per_sector,
            dtype=torch.uint8,
            pin_memory=cache.device.type != "cpu",
        )
        self._cpu_pool = CachePool(sectors, len(cache.allocators), num_reserved_sectors=0)
        for name, allocator in cache.cache_allocators.items():
            self._cpu_pool.set_blocks_per_sector(allocator.index, allocator.blocks_per_sector)
            self._cpu_views[name] = self._cpu_tensor.view(-1, allocator.bytes_per_block)

    def offload_requests(self) -> bool:
        """Takes blocks from requests until others have room; whether any has more now."""
        if self._cpu_pool is not None:
            names = [state.request_id for state, _ in self.scheduler.starved_requests]
            self._pages = {
                name: [self._exact_pages_of(name, allocator) for allocator in self._allocators]
                for name in names
            }
        return bool(super().offload_requests())

    def _exact_pages_of(self, name: str, allocator: PackedAllocator) -> list[int]:
        """The exact pages of a request, which is left with no blocks but those it still needs."""
        tokens = allocator.lengths[name]
        allocator.give_back(name, tokens)
        return list(allocator.exact_pages_of(name, tokens).values())

    def _offload_to_cpu(
        self, victims: list[Any], victim_block_tables: dict[str, dict[str, list[int]]]
    ) -> set[str]:
        """Moves what fits of requests whose blocks are free by now, but not written to again."""
        if self._cpu_pool is None:
            return set()
        held = {
            name: {kind: [block for block in table if block >= 0] for kind, table in tables.items()}
            for name, tables in victim_block_tables.items()
        }
        moved: set[str] = super()._offload_to_cpu(victims[: self._most - len(self._exact)], held)
        for name in moved:
            with self._stream_ctx():
                self._exact[name] = [
                    allocator.exact.tokens[:, :, pages].cpu()
                    for allocator, pages in zip(self._allocators, self._pages[name], strict=True)
                ]
        self.cache.moved += len(moved)
        return moved

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Moves the requests of a batch back, which have new blocks."""
        states = [x.state for x in requests_in_batch]
        names = [state.request_id for state in states if state.is_cpu_offloaded]
        with ExitStack() as tables:
            for allocator in self._allocators:
                tables.enter_context(allocator.only_held(names))
            super().restore_scheduled_requests(requests_in_batch)
        for name in names:
            with self._stream_ctx():
                exact = self._exact.pop(name)
                for allocator, held in zip(self._allocators, exact, strict=True):
                    allocator.restore(name, held)

    def free_request_cpu_cache(self, state: Any) -> None:
        """Forgets what the host holds of a request, if it does."""
        self._exact.pop(state.request_id, None)
        super().free_request_cpu_cache(state)

    def reset(self) -> None:
        """Forgets all requests."""
        super().reset()
        self._exact.clear()
