"""``kvpass::pack`` in Triton: the state of a first prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.format.filters import chosen
from kvpass.format.parse import parse_plan
from kvpass.format.state import empty_state
from lowering.codegen import load_kernels
from lowering.support import dense, unbounded
from lowering.triton.heuristics import COPIED_TOKENS, encode_tokens
from lowering.triton.launch import launch
from lowering.triton.layouts import (
    clipping,
    heads_together,
    layout_of,
    rooms,
    stored,
    unsupported_device,
    unsupported_dtype,
    unsupported_encoding,
    unsupported_heads,
)
from triton_templates import next_power_of_2


def unsupported_reason(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> str | None:
    """Why the kernel declines these arguments of ``kvpass::pack``, or None."""
    plan = str(stored(parse_plan(plan)))
    return (
        unsupported_device(new)
        or unsupported_encoding(plan, int(new.shape[3]), clip)
        or unsupported_dtype(new, "the cache")
        or unsupported_heads(new)
        or layout_of(plan, int(new.shape[3])).unsupported_reason()
    )


def pack(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """As `kvpass.ops.pack.pack`, for arguments that are supported."""
    p = parse_plan(plan)
    skipped = p.skipped(new.shape[2])
    # Not a slice: slicing a fake tensor asks for the GPU that it pretends to be on.
    new = new.narrow(2, skipped, new.shape[2] - skipped)
    batch, heads, length, head_dim = new.shape
    # A first prompt has room for what is packed of it: positions are slots.
    layout = layout_of(str(unbounded(stored(p))), head_dim)
    packed = p.packed(length)
    state = empty_state(new, p, packed)
    factors, each = clipping(p, clip)
    kernels = load_kernels("pack", layout=layout, clip_each=each)
    # Where tokens are packed at all, less than a packed run beyond the window stays exact.
    tail = 0 if layout.identity else p.sinks + p.retention.window + p.retention.pack_every - 1
    if layout.grows:
        tail = length - packed
    tail_programs = -(-tail // COPIED_TOKENS)
    new = dense(new)
    strides = (new.stride(0), new.stride(1), new.stride(2))
    arguments = (*state.tensors, new, *rooms(state.tensors, layout), *strides)
    if layout.cross_head:
        # At least one program stores how long sequences are.
        tokens, programs = COPIED_TOKENS, max(1, tail_programs)
    else:
        tokens = COPIED_TOKENS if layout.identity else encode_tokens(layout)
        programs = tail_programs + -(-packed // tokens)
    launch(
        kernels.pack_prompt, (programs, batch * heads), *arguments, length, packed, factors,
        KV_HEADS=heads, TOKENS=tokens, TAIL_PROGRAMS=tail_programs, COPIED=COPIED_TOKENS,
        CLIPPED=p.codec.clip != 1,
    )  # fmt: skip
    if layout.cross_head:
        if ranges is not None:
            state.qparams.copy_(ranges)
        together = heads_together(layout, heads)
        launch(
            kernels.pack_tokens, (packed, batch * (heads // together)), *arguments,
            KV_HEADS=heads, HEADS=together, HEADS_PADDED=next_power_of_2(together),
        )  # fmt: skip
    if layout.retained is not None:
        # Behind the sinks, if the prompt is longer than these.
        behind_sinks = new.narrow(2, torch.sym_min(p.sinks, length), packed)
        _, name = layout.retained
        kept = chosen(state.retained, state.positions, name, p.sinks, behind_sinks)
        for field, tensor in zip(("retained", "positions"), kept, strict=True):
            state.tensors[state.layout.names.index(field)] = tensor
    return state.tensors
