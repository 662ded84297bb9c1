"""`BlockPages`: the bytes of a block of the pool, which hold a page of tokens of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.format.channels import ChannelBasis
from kvpass.format.layout import codec_sizes
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan

# Fields begin at multiples of so many bytes, which every dtype divides.
_ALIGNED = 16


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


class BlockPages:
    """The pages of all layers in one block.

    Attributes:
        keys, values: by the number of the layer.
        page_size: tokens.
        nbytes: bytes of a block: a multiple of 128, and of the number of layers.
    """

    def __init__(
        self, plans: Sequence[LayerPlan], heads: int, dim: int, page_size: int, dtype: torch.dtype
    ) -> None:
        shape = (heads, page_size, dim)
        self.page_size = page_size
        self.keys = [TensorPages(p.keys, p.key_basis, shape, dtype) for p in plans]
        self.values = [TensorPages(p.values, p.value_basis, shape, dtype) for p in plans]
        used = sum(pages.nbytes for pages in (*self.keys, *self.values))
        self.nbytes = aligned(used, math.lcm(128, len(plans)))
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

    def packed_before(self, tokens: int) -> int:
        """`RetentionPolicy.packed_before`, the least of all layers."""
        return min(plan.retention.packed_before(tokens) for plan in self.plans)

    def exact_pages(self, tokens: int) -> list[int]:
        """The numbers of the pages in which tokens are exact after ``tokens`` of them."""
        first = self.packed_before(tokens - 1) // self.page_size
        sinks = range(min(-(-self.sinks // self.page_size), first))
        return [*sinks, *range(first, -(-tokens // self.page_size))]

    def bind(self, pool: Tensor) -> None:
        """Lets the pages lie in ``pool``, uint8 of whole blocks."""
        offset, blocks = 0, pool.view(-1, self.nbytes)
        for pages in (*self.keys, *self.values):
            pages.bind(blocks, offset)
            offset += pages.nbytes
