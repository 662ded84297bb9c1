"""``kvpass::unpack`` in Triton: a packed cache tensor as plain tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpass.format.filters import with_retained
from kvpass.format.state import State
from lowering.codegen import load_kernels
from lowering.support import unsupported_conversion, unsupported_extras
from lowering.triton.heuristics import decode_tokens
from lowering.triton.launch import launch, on_nvidia
from lowering.triton.layouts import (
    cos_sin_stride,
    layout_of,
    rooms,
    unsupported_device,
    unsupported_heads,
    unsupported_state,
)


def unsupported_reason(
    state: Sequence[Tensor], tokens: int | torch.SymInt, plan: str, dtype: torch.dtype
) -> str | None:
    """Why the kernel declines these arguments of ``kvpass::unpack``, or None."""
    s = State.of(state, plan)
    if s.plan.rope is not None and s.plan.window_size is not None:
        return "a rotary embedding is not supported where a window slides"
    return (
        unsupported_conversion(s.tokens, dtype)
        or unsupported_device(s.tokens)
        or unsupported_heads(s.tokens)
        or unsupported_extras(s.plan.codec, "outliers")
        or unsupported_state(state, plan)
    )


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """As `kvpass.ops.unpack.unpack`, for arguments that are supported.

    Each sequence of the batch has its own segment ends; a sequence of fewer than ``tokens`` tokens
    ends in zeros.
    """
    s = State.of(state, plan)
    batch, heads, _, head_dim = s.tokens.shape
    layout = layout_of(plan, head_dim)
    kernels = load_kernels("unpack", layout=layout)
    size = decode_tokens(layout)
    out = s.tokens.new_empty((batch, heads, tokens, head_dim))
    # The last tokens of a sliding window may begin within what one program decodes; sinks have
    # programs of their own.
    programs = -(-tokens // size) + int(layout.sliding or layout.sinks > 0)
    launch(
        kernels.unpack_tokens, (programs, batch * heads),
        *state, out, *rooms(state, layout), cos_sin_stride(s), tokens,
        KV_HEADS=heads, TOKENS=size, INLINE_ASM=on_nvidia(),
    )  # fmt: skip
    return with_retained(out, 0, s.retained, s.positions) if s.plan.retained else out
