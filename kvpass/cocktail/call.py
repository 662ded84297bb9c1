"""The tokens of a call that has a prompt: their slots, and the places they then have in the
caches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpass._torch import storage_key
from kvpass.cocktail.context import Request, current
from kvpass.cocktail.placement import ChunkFormat, joined, on_device, segment_of_tokens, slots_of
from kvpass.errors import CacheStateError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.order import ChannelOrder
from kvpass.ops.chunks import positions
from kvpass.tensor.chunked import ChunkedKV

_NO_BITS = (
    "kvpass: this prompt has no chunk bits, so all of it stays exact. Call the model within "
    "'with kvpass.cocktail.use(bits):', where bits is a kvpass.cocktail.ChunkBits. kvpass warns "
    "once per graph."
)


@dataclass(frozen=True)
class Placed:
    """Where the tokens of a prompt go.

    Attributes:
        slots: for `kvpass.ops.chunks.reorder_chunks`.
        places: of all tokens, once the prompt has joined the caches; all layers share their memory.
        exact: as many exact tokens as any row then has.
        request: whose bits they are, if anybody's.
        past, new: tokens before the prompt, and of it.
    """

    slots: list[Tensor]
    places: list[Tensor]
    exact: int
    request: Request | None
    past: int
    new: int

    def fresh(
        self,
        made: Sequence[Tensor],
        plan: ChunkedPlan,
        tokens: int,
        dtype: torch.dtype,
        order: ChannelOrder | None,
    ) -> ChunkedKV:
        """The cache tensor of a first prompt, from what the op has made."""
        state = [*made, *(_another(places) for places in self.places)]
        handle = ChunkedKV(state, plan, tokens, dtype, written=self.exact, order=order)
        handle.mark_dynamic()
        return handle

    def extended(self, handle: ChunkedKV) -> ChunkedKV:
        """``handle``, which a later prompt has extended."""
        for name, places in zip(handle.plan.chunk_positions, self.places, strict=True):
            setattr(handle, name, _another(places))
        handle.written = self.exact
        return handle

    def taken(self) -> None:
        """The call has succeeded."""
        if self.request is not None:
            self.request.take(self.past, self.new)


def place(
    handles: Sequence[ChunkedKV],
    chunk_format: ChunkFormat,
    batch: int,
    new: int,
    device: torch.device,
    tell: Callable[[], bool] = lambda: True,
) -> Placed:
    """Where ``new`` tokens of each of ``batch`` sequences go, by the bits in use.

    Args:
        handles: what they are to extend: keys and values of all layers, which get room; none for a
            first prompt.
        chunk_format: what their plans say of chunks.
        tell: whether to warn if a first prompt has no bits.

    Raises:
        OptionError: if the bits do not fit.
        CacheStateError: if the handles hold their tokens in different segments.
    """
    past = handles[0].shape[2] if handles else 0
    request = current()
    if request is not None and not request.applies(past, new):
        request = None
    if request is None and not handles and tell():
        warnings.warn(_NO_BITS, stacklevel=2)
    bits = None if request is None else request.bits
    segments = segment_of_tokens(bits, chunk_format, batch, new)
    numbers = slots_of(segments, chunk_format)
    counts = [(segments == s).sum(1) for s in range(len(chunk_format.chunk_bits))]
    slots = [s.view(batch, -1, chunk_format.tile) for s in on_device(numbers, device)]
    if not handles:
        places = [s.flatten(1) for s in slots]
        return Placed(slots, places, int(counts[-1].max(initial=0)), request, past, new)
    _check_same(handles)
    first = handles[0]
    held = [p.cpu().numpy() for p in positions(first.named, first.plan)]
    after = []
    for known, more in zip(held, numbers, strict=True):
        rows = zip(known, more, strict=True)
        parts = [(a[a >= 0].astype(np.int32), past + b[b >= 0]) for a, b in rows]
        after.append(joined(parts, chunk_format.tile))
    longest = [int((x >= 0).sum(1).max(initial=0)) for x in after]
    for handle in handles:
        handle.reserve_segments(longest, chunk_format.tile)
    return Placed(slots, on_device(after, device), longest[-1], request, past, new)


def _another(places: Tensor) -> Tensor:
    """Another tensor on the same memory, and no view: Dynamo would guard its graphs on which inputs
    are the same tensor, and compile others for a cache whose rows were reordered."""
    with torch.inference_mode(False):
        other = torch.empty(0, dtype=places.dtype, device=places.device)
        return other.set_(places.untyped_storage(), 0, places.shape, places.stride())


def _check_same(handles: Sequence[ChunkedKV]) -> None:
    first = handles[0]
    names = ("segment_ends", *first.plan.chunk_positions)
    for other in handles[1:]:
        for name in names:
            a, b = getattr(first, name), getattr(other, name)
            if storage_key(a) != storage_key(b) and not torch.equal(a, b):
                raise CacheStateError(
                    "The layers of a cache hold other tokens in their segments of chunks: they "
                    "come from different texts. Use a new cache."
                )
