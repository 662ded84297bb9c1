"""What one attention layer launches, recorded for inspection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass._torch import symbolic_mode, symbolic_size
from kvpass.errors import KernelError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.parse import parse_plan
from kvpass.format.rope import Rope
from kvpass.ops.chunks import reorder_chunks_fake
from kvpass.ops.cos_sin import pack_cos_sin_fake
from kvpass.ops.pack import pack_fake
from lowering.triton import append, attention, chunks, pack, unpack
from lowering.triton.launch import Launch, record_launches

# Sizes that do not change the kernels: tokens of the prompt, and KV heads (but where groups or
# outliers are those of several).
_TOKENS = 4096
KV_HEADS = 8


def layer_launches(
    k_plan: str,
    v_plan: str,
    *,
    key_dim: int,
    value_dim: int,
    heads_per_group: int,
    dtype: torch.dtype = torch.float16,
    with_sinks: bool = False,
    **variant: Any,
) -> list[Launch]:
    """What a layer launches for a prompt, for one decode step, and for a second prompt.

    Tensors are fake. Lengths are symbols, as for a cache that grows; those of static caches (plans
    with ``room``) are numbers.

    Args:
        k_plan, v_plan: printed plans.
        key_dim, value_dim: channels of a head.
        heads_per_group: query heads that share a KV head.
        dtype: the model's dtype.
        with_sinks: whether attention has sinks.
        variant: more arguments of ``kvpass::attention``: ``causal``, ``window``, ``softcap``.

    Raises:
        KernelError: if a kernel declines these arguments.
    """
    mode = symbolic_mode()
    with mode, record_launches() as launches:
        tokens: Any = _TOKENS
        if parse_plan(k_plan).room is None:
            tokens = symbolic_size(mode, "tokens", _TOKENS)
        keys = _state(k_plan, tokens, key_dim, dtype, rotated=True)
        values = _state(v_plan, tokens, value_dim, dtype)
        heads = KV_HEADS * heads_per_group
        q = keys[0].new_empty(1, heads, 1, key_dim, dtype=dtype)
        sinks = q.new_empty(heads) if with_sinks else None
        arguments = (q, keys, values, None, 1.0, k_plan, v_plan, sinks)
        if parse_plan(k_plan).op_suffix:
            _require("attention_chunks", chunks.unsupported_attention(*arguments, **variant))
            chunks.attention_chunks(*arguments, **variant)
        else:
            _require("attention", attention.unsupported_reason(*arguments, **variant))
            attention.attention(*arguments, **variant)
    return launches


def _state(
    plan: str, tokens: int, dim: int, dtype: torch.dtype, rotated: bool = False
) -> list[Tensor]:
    """The state after a prompt and a decode step, whose token is ``rotated`` when it is stored or
    read. Records their kernels and that of `unpack`."""
    x = torch.empty(1, KV_HEADS, tokens, dim, dtype=dtype, device="cuda")
    p = parse_plan(plan)
    if isinstance(p, ChunkedPlan):
        return _chunked_state(x, p, rotated)
    factors = p.codec.clip
    clip = None
    if isinstance(factors, tuple):
        clip = x.new_empty(len(factors), dtype=torch.float32)
    _require("pack", pack.unsupported_reason(x, plan, clip=clip))
    pack.pack(x, plan, clip=clip)
    state = pack_fake(x, plan)
    append.append(state, **_new_token(x, plan, rotated and p.rope is None), clip=clip)
    if p.rope is not None:
        rows = x.new_empty(1, tokens, p.rope.channels)
        state.append(pack_cos_sin_fake(rows, plan))
    length = p.logical(tokens + 1)
    _require("unpack", unpack.unsupported_reason(state, length, plan, dtype))
    unpack.unpack(state, length, plan, dtype)
    return state


def _new_token(x: Tensor, plan: str, rotated: bool) -> dict[str, Any]:
    """What a decode step appends."""
    dim = x.shape[3]
    token: dict[str, Any] = {"new": x.new_empty(1, KV_HEADS, 1, dim), "plan": plan}
    if rotated:
        token |= {"cos_sin": x.new_empty(1, 1, dim), "rope": str(Rope("halves", 0, dim))}
    return token


def _chunked_state(x: Tensor, p: ChunkedPlan, rotated: bool) -> list[Tensor]:
    """As `_state`, with room for as many tokens in each segment as all have."""
    plan, tokens = str(p), x.shape[2]
    tiles = -(-tokens // p.tile)
    index = [x.new_empty(1, tiles, p.tile, dtype=torch.int32) for _ in p.codecs]
    _require("reorder_chunks", chunks.unsupported_reorder(x, index, plan))
    chunks.reorder_chunks(x, index, plan)
    state = reorder_chunks_fake(x, index, plan)
    chunks.append_chunks(state, **_new_token(x, plan, rotated))
    state += [x.new_empty(1, tiles * p.tile, dtype=torch.int32) for _ in p.codecs]
    _require("unpack_chunks", chunks.unsupported_unpack(state, tokens, plan, x.dtype))
    chunks.unpack_chunks(state, tokens, plan, x.dtype)
    return state


def _require(op: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"The kernel of kvpass::{op} cannot be used: {reason}.")
