"""`BlockPages`: the bytes of a block of the pool, which hold a page of tokens of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.format.channels import ChannelBasis
from kvpass.format.layout import codec_sizes
from kvpass.format.quantize import decode, encode
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
        self._fields = plan.layout.encoded()
        sizes = {"batch": 1, "heads": heads, "channels": dim, "capacity": page_size}
        sizes |= codec_sizes(plan.codec, "", heads, dim)
        like = torch.empty(0, dtype=dtype, device="meta")
        self._empty = [field.empty(like, sizes) for field in self._fields]
        self.nbytes = sum(aligned(t.nbytes) for t in self._empty)
        # Of each field ``[blocks, entries of a page, ...]``, and with blocks before the entries.
        self._entries: list[Tensor] = []
        self._pages: list[Tensor] = []

    def bind(self, pool: Tensor, offset: int) -> None:
        """Lets the pages lie at ``offset`` in the blocks of ``pool`` uint8 ``[blocks, bytes]``."""
        self._entries, self._pages = [], []
        for field, t in zip(self._fields, self._empty, strict=True):
            view = pool[:, offset : offset + t.nbytes].view(t.dtype).unflatten(1, t.shape[1:])
            self._entries.append(view.movedim(field.token_dim, 1))
            self._pages.append(view.movedim(0, field.token_dim - 1))
            offset += aligned(t.nbytes)

    def write(self, blocks: Tensor, start: int, x: Tensor) -> None:
        """Encodes tokens ``x`` ``[1, H, n, D]``, from position ``start`` on, of the request whose
        ``blocks``, int64 ``[pages]``, these are; both whole groups."""
        x = x if self.basis is None else self.basis.store(x)
        parts = encode(self.plan.codec, x)
        for field, entries, part in zip(self._fields, self._entries, parts, strict=True):
            first, count = start // field.group, x.shape[2] // field.group
            at, page = torch.arange(first, first + count, device=x.device), entries.shape[1]
            entries[blocks[at // page], at % page] = part[0].movedim(field.token_dim - 1, 0)

    def gathered(self, blocks: Tensor, first: int, tokens: int) -> list[Tensor]:
        """What `write` has encoded of ``tokens`` of a request from position ``first`` on, both
        whole groups: the fields ``[1, ...]`` of `StateLayout.encoded`."""
        parts = []
        for field, pages in zip(self._fields, self._pages, strict=True):
            dim, count = field.token_dim - 1, first + tokens
            used = blocks[: -(-count // (pages.shape[dim + 1] * field.group))]
            found = pages.index_select(dim, used).flatten(dim, dim + 1).unsqueeze(0)
            parts.append(field.tokens(found, first, tokens).contiguous())
        return parts

    def read(self, blocks: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
        """The first ``tokens`` of a request, decoded: ``[1, H, tokens, D]``."""
        x = decode(self.plan.codec, self.gathered(blocks, 0, tokens), dtype)
        return x if self.basis is None else self.basis.restore(x)


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
