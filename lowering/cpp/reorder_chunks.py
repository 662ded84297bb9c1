"""``kvpass::reorder_chunks`` with each level encoded in C++, as ``kvpass::pack`` does a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpass.cache.codec import Codec
from kvpass.cache.residency import Residency
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.reorder_chunks import encoded, reordered
from lowering.cpp import pack


def supports(new: Tensor, slots: Sequence[Tensor], plan: str) -> str | None:
    """Why C++ declines these arguments of ``kvpass::reorder_chunks``, or None."""
    codecs = [codec for codec in TensorPlan.parse(plan).levels if not codec.identity]
    if not codecs:
        return f"{plan} stores all tokens as they are"
    reasons = (pack.supports(new, _plan(codec)) for codec in codecs)
    return next(filter(None, reasons), None)


def reorder_chunks(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """As `kvpass.ops.reorder_chunks.reorder_chunks`, for arguments that `supports` takes."""
    return reordered(new, slots, plan, _encoded)


def _plan(codec: Codec) -> str:
    """Of one level alone, all of whose tokens are packed."""
    return str(TensorPlan(codec, Residency(0, codec.token_group)))


def _encoded(codec: Codec, tokens: Tensor) -> Sequence[Tensor]:
    return encoded(codec, tokens) if codec.identity else pack.pack(tokens, _plan(codec))[:2]
