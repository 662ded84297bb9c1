"""`BlockPages`: the bytes of a block of the pool, which hold a page of tokens of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpass.format.channels import ChannelBasis
from kvpass.format.layout import codec_sizes
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan

# Fields, and blocks, begin at multiples of so many bytes, which every dtype divides.
_ALIGNED, _BLOCK_ALIGNED = 16, 128
# Types of layers, as configurations name them.
FULL, SLIDING = "full_attention", "sliding_attention"


def aligned(size: int, to: int = _ALIGNED) -> int:
    """The least multiple of ``to`` that is no less than ``size``."""
    return -(-size // to) * to


class TensorPages:
    """The packed pages of one cache tensor (the keys or the values of a layer) in all blocks.

    Page ``i`` of a request holds its tokens ``i * page_size ...``, each field of their encoding as
    `kvpass.format.layout.codec_fields` has it, with the page for the capacity.

    Attributes:
        plan: how tokens are stored, and as ops take it, ``printed``.
        basis: how the pages hold the channels of each head.
        page_size: tokens.
        nbytes: bytes of a page.
        stored: the fields, as `kvpass.ops.pages.Pages` has them.
    """

    def __init__(
        self,
        plan: TensorPlan,
        basis: ChannelBasis | None,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        heads, page_size, dim = shape
        self.plan, self.basis, self.page_size = plan, basis, page_size
        self.printed = str(plan)
        sizes = {"batch": 1, "heads": heads, "channels": dim, "capacity": page_size}
        sizes |= codec_sizes(plan.codec, "", heads, dim)
        like = torch.empty(0, dtype=dtype, device="meta")
        self._empty = [field.empty(like, sizes) for field in plan.layout.encoded()]
        self.nbytes = sum(aligned(t.nbytes) for t in self._empty)
        self.stored: list[Tensor] = []

    def bind(self, pool: Tensor, offset: int) -> None:
        """Lets the pages lie at ``offset`` in the blocks of ``pool`` uint8 ``[blocks, bytes]``."""
        self.stored = []
        for t in self._empty:
            view = pool[:, offset : offset + t.nbytes].view(t.dtype)
            self.stored.append(view.unflatten(1, t.shape[1:]))
            offset += aligned(t.nbytes)


def layers_by_type(config: Any) -> dict[str, list[int]]:
    """The numbers of the layers of each type, of a decoder with this configuration."""
    sliding = getattr(config, "sliding_window", None) is not None
    default = [SLIDING if sliding else FULL] * config.num_hidden_layers
    found: dict[str, list[int]] = {}
    for i, kind in enumerate(getattr(config, "layer_types", None) or default):
        found.setdefault(kind, []).append(i)
    return found


def window_of(config: Any, kind: str) -> int:
    """The positions that a query sees in layers of this type, its own counted; 0: all."""
    return int(config.sliding_window) if kind == SLIDING else 0


def within(plan: TensorPlan, window: int) -> TensorPlan:
    """How tokens of ``plan`` are stored where queries see a window, see `window_of`, and each token
    is stored as if it had a step of its own."""
    if window:
        return replace(plan.sliding(window - 1), window_size=None)
    return replace(plan, retention=plan.retention.of_single_steps())


class BlockPages:
    """The pages of all layers of one type in one block.

    Attributes:
        keys, values: of each of these layers.
        page_size: tokens.
        window: positions that a query sees, its own counted; 0: all.
        nbytes: bytes of a block.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        heads: int,
        dim: int,
        page_size: int,
        dtype: torch.dtype,
        window: int = 0,
    ) -> None:
        shape = (heads, page_size, dim)
        self.page_size, self.window = page_size, window
        self.keys, self.values = (
            [TensorPages(within(plan, window), basis, shape, dtype) for plan, basis in tensors]
            for tensors in (
                [(p.keys, p.key_basis) for p in plans],
                [(p.values, p.value_basis) for p in plans],
            )
        )
        used = sum(pages.nbytes for pages in (*self.keys, *self.values))
        self.nbytes = aligned(used, _BLOCK_ALIGNED)
        # Keys and values are exact between the same positions, so that one page serves both.
        self.plans = tuple({pages.plan for pages in (*self.keys, *self.values)})

    @property
    def sinks(self) -> int:
        """First tokens that stay exact in some layer."""
        return max(plan.sinks for plan in self.plans)

    @property
    def most_exact_pages(self) -> int:
        """The most pages that a request's exact tokens lie in."""
        kept = (p.sinks + p.retention.window + p.retention.pack_every for p in self.plans)
        # The most that so many tokens in a row touch, wherever they begin.
        touched = (max(kept) + self.page_size - 2) // self.page_size + 1
        return touched + -(-self.sinks // self.page_size)

    def first_page(self, tokens: int) -> int:
        """The number of the first page that steps behind ``tokens`` tokens look at."""
        if not self.window:
            return 0
        seen = max(tokens + 1 - self.window, 0)
        return min(seen, self.packed_before(tokens - 1)) // self.page_size

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the blocks of a request of ``tokens`` tokens, between steps."""
        pages = -(-tokens // self.page_size)
        if self.window:
            pages = min(pages, -(-self.window // self.page_size) + 1)
        return pages * self.nbytes

    def packed_before(self, tokens: int) -> int:
        """`RetentionPolicy.packed_before`, the least of all layers."""
        return min(plan.retention.packed_before(tokens) for plan in self.plans)

    def exact_pages(self, tokens: int) -> list[int]:
        """The numbers of the pages in which tokens are exact after ``tokens`` of them."""
        first = self.packed_before(tokens - 1) // self.page_size
        sinks = range(min(-(-self.sinks // self.page_size), first))
        return [*sinks, *range(first, -(-tokens // self.page_size))]

    def bind(self, pool: Tensor) -> None:
        """Lets the pages lie in ``pool``, uint8 of whole blocks of `nbytes`."""
        offset, blocks = 0, pool.view(-1, self.nbytes)
        for pages in (*self.keys, *self.values):
            pages.bind(blocks, offset)
            offset += pages.nbytes


def sector_bytes(groups: Sequence[BlockPages]) -> int:
    """Bytes that hold whole blocks of each of one or two groups. Blocks become as much longer as
    wastes least."""
    small, *others = sorted(groups, key=lambda pages: pages.nbytes)
    if not others:
        return small.nbytes
    (large,) = others
    # Of each way: the bytes of both blocks.
    count = large.nbytes // small.nbytes
    more_small = aligned(-(-large.nbytes // count), _BLOCK_ALIGNED)
    more_large = aligned(large.nbytes, small.nbytes)
    if (count + 1) * more_small < more_large + small.nbytes:
        small.nbytes, large.nbytes = more_small, count * more_small
    else:
        large.nbytes = more_large
    return large.nbytes
