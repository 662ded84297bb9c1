"""Where the tokens of a prompt go: which segment, in which order. On the host, per request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpass.cocktail.bits import ChunkBits
from kvpass.errors import OptionError, PlanError, shown
from kvpass.format.chunked_plan import ChunkedPlan

Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class ChunkFormat:
    """What the plans of all cache tensors of a model say of the chunks of a prompt.

    Attributes:
        chunk_bits: the bits by which each level is asked for, those of exact tokens at the end.
        chunk: chunks are multiples of this many tokens.
        tile: room in a segment comes in multiples of this many tokens.
    """

    chunk_bits: tuple[float, ...]
    chunk: int
    tile: int

    @staticmethod
    def of(plans: Sequence[ChunkedPlan]) -> ChunkFormat:
        """Those of ``plans``.

        Raises:
            PlanError: if they are not the same.
        """
        for plan in plans:
            if (plan.chunk_bits, plan.chunk) != (plans[0].chunk_bits, plans[0].chunk):
                raise PlanError(
                    "The layers of a model need the same bits for the chunks of a prompt, not "
                    f"{plans[0]} and {plan}."
                )
        return ChunkFormat(
            plans[0].chunk_bits, plans[0].chunk, math.lcm(*(plan.tile for plan in plans))
        )


def check_bits(bits: ChunkBits, chunk_format: ChunkFormat, batch: int, tokens: int) -> None:
    """Raises:
    OptionError: if ``bits`` do not fit a prompt of ``batch`` sequences of ``tokens``.
    """
    if len(bits.bits) != batch:
        raise OptionError(
            f"The chunk bits are those of {len(bits.bits)} sequences, the prompt has {batch}."
        )
    chunk = bits.chunk
    if chunk % chunk_format.chunk:
        raise OptionError(
            f"chunk={shown(chunk)} is not supported; allowed: a multiple of {chunk_format.chunk} "
            "tokens, the chunk of the plan."
        )
    for row, (start, asked) in enumerate(zip(bits.starts, bits.bits, strict=True)):
        if start + chunk * len(asked) > tokens:
            raise OptionError(
                f"Sequence {row} has {len(asked)} chunks of {chunk} tokens from token {start} on, "
                f"the prompt {tokens} tokens."
            )
        unknown = [b for b in asked if b not in chunk_format.chunk_bits]
        if unknown:
            known = ", ".join(f"{label:g}" for label in chunk_format.chunk_bits)
            raise OptionError(
                f"A chunk of sequence {row} is to have {shown(unknown[0])} bits; allowed: {known}."
            )


def segment_of_tokens(
    bits: ChunkBits | None, chunk_format: ChunkFormat, batch: int, tokens: int
) -> NDArray[Any]:
    """The segment of each token, int8 ``[batch, tokens]``; the last one is exact.

    Raises:
        OptionError: see `check_bits`.
    """
    found = np.full((batch, tokens), len(chunk_format.chunk_bits) - 1, np.int8)
    if bits is None:
        return found
    check_bits(bits, chunk_format, batch, tokens)
    for row, (start, asked) in enumerate(zip(bits.starts, bits.bits, strict=True)):
        segments = np.array([chunk_format.chunk_bits.index(b) for b in asked], np.int8)
        found[row, start : start + bits.chunk * len(asked)] = np.repeat(segments, bits.chunk)
    return found


def joined(rows: Sequence[Sequence[Numbers]], tile: int) -> Numbers:
    """``[B, N]`` from the parts of each row, -1 behind their ends; ``N`` is whole tiles, two at
    least (compilers specialise sizes of 0 and 1)."""
    whole = [np.concatenate(parts) for parts in rows]
    longest = max((len(row) for row in whole), default=0)
    out = np.full((len(whole), max(-(-longest // tile), 2) * tile), -1, np.int32)
    for row, values in enumerate(whole):
        out[row, : len(values)] = values
    return out


def slots_of(segments: NDArray[Any], chunk_format: ChunkFormat) -> list[Numbers]:
    """For each segment the tokens that go there, ``[B, N]``, see `joined`."""
    return [
        joined([[np.flatnonzero(row == s).astype(np.int32)] for row in segments], chunk_format.tile)
        for s in range(len(chunk_format.chunk_bits))
    ]


def on_device(numbers: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """As tensors."""
    # They may be kept with a cache: no inference tensors.
    with torch.inference_mode(False):
        return [torch.from_numpy(x).to(device, non_blocking=True) for x in numbers]
