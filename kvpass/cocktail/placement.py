"""Where the tokens of a prompt go: which segment, in which order. On the host, for each request."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpass._torch import storage_key
from kvpass.cocktail.bits import ChunkBits
from kvpass.cocktail.context import Request, request_for
from kvpass.errors import CacheStateError, OptionError, PlanError, check, shown
from kvpass.format.channels import ChannelBasis
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.shard import WHOLE, Shard
from kvpass.format.sharded_plan import Sharded
from kvpass.ops.chunks import positions
from kvpass.tensor.branches import another
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.sharded import kind_of

Numbers = NDArray[np.int32]

_NO_BITS = (
    "kvpass: this prompt has no chunk bits, so all of it stays exact. Call the model within "
    "'with kvpass.cocktail.use(bits):', where bits is a kvpass.cocktail.ChunkBits. kvpass warns "
    "once per graph."
)


@dataclass(frozen=True)
class ChunkFormat:
    """What the plans of all cache tensors of a model say of the chunks of a prompt.

    Attributes:
        chunk_bits: the bits by which each segment is asked for, those of exact tokens at the end.
        chunk: chunks are multiples of this many tokens.
        tile: room in a segment comes in multiples of this many tokens.
        shard: the part of every sequence that this process holds.
    """

    chunk_bits: tuple[float, ...]
    chunk: int
    tile: int
    shard: Shard = WHOLE

    @staticmethod
    def of(plans: Sequence[ChunkedPlan]) -> ChunkFormat:
        """What all ``plans`` say.

        Raises:
            PlanError: if they do not say the same.
        """
        for plan in plans:
            if (plan.chunk_bits, plan.chunk) != (plans[0].chunk_bits, plans[0].chunk):
                raise PlanError(
                    "The layers of a model need the same bits for the chunks of a prompt, not "
                    f"{plans[0]} and {plan}."
                )
        tile, first = math.lcm(*(plan.tile for plan in plans)), plans[0]
        shard = first.shard if isinstance(first, Sharded) else WHOLE
        return ChunkFormat(first.chunk_bits, first.chunk, tile, shard)

    def own(self, tokens: NDArray[Any], past: int) -> NDArray[Any]:
        """The part of the ``tokens`` of a prompt that this process holds, of those that go into
        one segment behind ``past`` others: whole chunks, dealt in turn."""
        chunks = np.arange(len(tokens)) // self.chunk + past // self.chunk
        found: NDArray[Any] = tokens[chunks % self.shard.size == self.shard.rank]
        return found


@dataclass(frozen=True)
class Placed:
    """Where the tokens of a prompt go.

    Attributes:
        scatter_index: for each segment the tokens that go there, int32 ``[B, tiles, tile]``, see
            `kvpass.ops.chunks.reorder_chunks`.
        positions: where the tokens of each segment stand in the text, once the prompt has joined
            the caches, int32 ``[B, N]``; all layers share their memory.
        exact: as many exact tokens as any row then has here.
        request: whose bits they are; None: nobody's.
        past, new: tokens before the prompt, and its own.
    """

    scatter_index: list[Tensor]
    positions: list[Tensor]
    exact: int
    request: Request | None
    past: int
    new: int

    def fresh(
        self,
        state: Sequence[Tensor],
        plan: ChunkedPlan,
        dtype: torch.dtype,
        basis: ChannelBasis | None,
    ) -> ChunkedKV:
        """The cache tensor of a first prompt, from the ``state`` that the op returned."""
        state = [*state, *map(another, self.positions)]
        kind = kind_of(plan)
        handle = cast(ChunkedKV, kind(state, plan, self.new, dtype, self.exact, basis))
        handle.mark_dynamic()
        return handle

    def extended(self, handle: ChunkedKV) -> ChunkedKV:
        """``handle``, which a later prompt has extended."""
        for name, tensor in zip(handle.plan.chunk_positions, self.positions, strict=True):
            handle.hold(name, another(tensor))
        handle.written = self.exact
        return handle

    def succeeded(self) -> None:
        """Marks the bits as used: the call has succeeded."""
        if self.request is not None:
            self.request.used = (self.past, self.new)


def place(
    handles: Sequence[ChunkedKV],
    chunk_format: ChunkFormat,
    batch: int,
    new: int,
    device: torch.device,
    warn: Callable[[], bool] = lambda: True,
) -> Placed:
    """Where ``new`` tokens of each of ``batch`` sequences go, by the bits in use.

    Args:
        handles: keys and values of all layers, which they are to extend and which get room; none
            for a first prompt.
        chunk_format: what their plans say of chunks.
        warn: whether to warn if a first prompt has no bits.

    Raises:
        OptionError: if the bits do not fit.
        CacheStateError: if the handles hold their tokens in different segments.
    """
    past = handles[0].shape[2] if handles else 0
    request = request_for(past, new)
    if request is None and not handles and warn():
        warnings.warn(_NO_BITS, stacklevel=2)
    bits = None if request is None else request.bits
    segments, tile = _segment_of_tokens(bits, chunk_format, batch, new), chunk_format.tile
    numbers = [
        _padded([chunk_format.own(np.flatnonzero(row == segment), past) for row in segments], tile)
        for segment in range(len(chunk_format.chunk_bits))
    ]
    index = [tokens.view(batch, -1, tile) for tokens in _on_device(numbers, device)]
    if not handles:
        exact = int((numbers[-1] >= 0).sum(1).max(initial=0))
        return Placed(index, [i.flatten(1) for i in index], exact, request, past, new)
    _check_same(handles)
    held = [p.cpu().numpy() for p in positions(handles[0].named, handles[0].plan)]
    after = []
    for known, more in zip(held, numbers, strict=True):
        rows = zip(known, more, strict=True)
        after.append(_padded([np.append(a[a >= 0], past + b[b >= 0]) for a, b in rows], tile))
    longest = [int((x >= 0).sum(1).max(initial=0)) for x in after]
    for handle in handles:
        handle.reserve_segments(longest, tile)
    return Placed(index, _on_device(after, device), longest[-1], request, past, new)


def _check_same(handles: Sequence[ChunkedKV]) -> None:
    first, *others = handles
    for other in others:
        for name in ("segment_ends", *first.plan.chunk_positions):
            a, b = getattr(first, name), getattr(other, name)
            if storage_key(a) != storage_key(b) and not torch.equal(a, b):
                raise CacheStateError(
                    "The layers of a cache hold other tokens in their segments of chunks: they "
                    "come from different texts. Use a new cache."
                )


def _segment_of_tokens(
    bits: ChunkBits | None, chunk_format: ChunkFormat, batch: int, tokens: int
) -> NDArray[np.int8]:
    """The segment of each token, int8 ``[batch, tokens]``; the last one is exact."""
    known = chunk_format.chunk_bits
    found = np.full((batch, tokens), len(known) - 1, np.int8)
    if bits is None:
        return found
    if len(bits.bits) != batch:
        raise OptionError(
            f"The chunk bits are those of {len(bits.bits)} sequences, the prompt has {batch}."
        )
    allowed = f"a multiple of {chunk_format.chunk} tokens, the chunk of the plan"
    check("chunk", bits.chunk, bits.chunk % chunk_format.chunk == 0, allowed)
    rows = zip(bits.starts, bits.ends, bits.bits, strict=True)
    for row, (start, end, asked) in enumerate(rows):
        if end > tokens:
            raise OptionError(
                f"Sequence {row} has {len(asked)} chunks of {bits.chunk} tokens from token {start} "
                f"on, the prompt {tokens} tokens."
            )
        if unknown := [b for b in asked if b not in known]:
            listed = ", ".join(f"{b:g}" for b in known)
            raise OptionError(
                f"A chunk of sequence {row} is to have {shown(unknown[0])} bits; allowed: {listed}."
            )
        found[row, start:end] = np.repeat([known.index(b) for b in asked], bits.chunk)
    return found


def _padded(rows: Sequence[NDArray[Any]], tile: int) -> Numbers:
    """Rows as one array ``[B, N]``, -1 behind their ends; ``N`` is whole tiles, two at least
    (compilers specialise sizes of 0 and 1)."""
    longest = max(map(len, rows), default=0)
    out = np.full((len(rows), max(-(-longest // tile), 2) * tile), -1, np.int32)
    for row, values in enumerate(rows):
        out[row, : len(values)] = values
    return out


def _on_device(numbers: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """The arrays as tensors."""
    # They may be kept with a cache: no inference tensors.
    with torch.inference_mode(False):
        return [torch.from_numpy(x).to(device, non_blocking=True) for x in numbers]
