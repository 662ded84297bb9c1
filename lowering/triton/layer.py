"""What one attention layer launches, recorded for inspection."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kvpass._torch_sizes import symbolic_mode, symbolic_size
from kvpass.errors import KernelError
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.format.rope import Rope
from kvpass.ops.chunks import reorder_chunks_fake
from kvpass.ops.cos_sin import pack_cos_sin_fake
from kvpass.ops.pack import pack_fake
from lowering.triton import append_attention, chunks, pack, unpack
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
    new_varies: bool = False,
    keys_rotated: bool = False,
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
        new_varies: the step has up to `MAX_STEP` new tokens, another number each time; else one.
        keys_rotated: the step rotates the channels of new keys and of the query; else its new keys
            get their rotary embedding, if that is not done when they are read.
        variant: more arguments of ``kvpass::attention``: ``causal``, ``window``, ``softcap``.

    Raises:
        KernelError: if a kernel declines these arguments.
    """
    mode = symbolic_mode()
    with mode, record_launches() as launches:
        tokens: Any = _TOKENS
        if parse_plan(k_plan).room is None:
            tokens = symbolic_size(mode, "tokens", _TOKENS)
        keys, values = _prompt(tokens, key_dim, dtype), _prompt(tokens, value_dim, dtype)
        new: Any = 1
        if new_varies:
            new = symbolic_size(mode, "new", MAX_STEP)
            # The guard of a graph that appends before it attends.
            assert new <= MAX_STEP
        q = keys.new_empty(1, KV_HEADS * heads_per_group, new, key_dim)
        sinks = q.new_empty(KV_HEADS * heads_per_group) if with_sinks else None
        state = _chunked_state if parse_plan(k_plan).op_suffix else _state
        arguments = (q, state(keys, k_plan), state(values, v_plan), None, 1.0, k_plan, v_plan)
        new_tokens = _new_tokens(keys, new), _new_tokens(values, new)
        shape = 1, 1, 1, 1, key_dim, key_dim
        basis = q.new_empty(shape, dtype=torch.float32) if keys_rotated else None
        _step(*new_tokens, basis, *arguments, sinks, **variant)
    return launches


def _prompt(tokens: Any, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, KV_HEADS, tokens, dim, dtype=dtype, device="cuda")


def _new_tokens(x: Tensor, count: Any) -> Tensor:
    return x.new_empty(1, KV_HEADS, count, x.shape[3])


def _state(x: Tensor, plan: str) -> list[Tensor]:
    """The state after a prompt. Records the kernels that make it and that of `unpack`."""
    p, clip = parse_plan(plan), _clip(x, plan)
    _require("pack", pack.unsupported_reason(x, plan, clip=clip))
    pack.pack(x, plan, clip=clip)
    state = pack_fake(x, plan)
    if p.rope is not None:
        rows = x.new_empty(1, x.shape[2], p.rope.channels)
        state.append(pack_cos_sin_fake(rows, plan))
    length = p.logical(x.shape[2])
    _require("unpack", unpack.unsupported_reason(state, length, plan, x.dtype))
    unpack.unpack(state, length, plan, x.dtype)
    return state


def _clip(x: Tensor, plan: str) -> Tensor | None:
    """The factors of clipping, if each group has its own."""
    factors = parse_plan(plan).codec.clip
    if not isinstance(factors, tuple):
        return None
    return x.new_empty(len(factors), dtype=torch.float32)


def _step(
    keys: Tensor, values: Tensor, basis: Tensor | None, *attention: Any, **variant: Any
) -> None:
    """Records a decode step, with a rotary embedding for new ``keys`` that get one before they are
    stored."""
    plans = attention[5:7]
    rotation = _rotation(keys, plans[0]) if basis is None else (None, None)
    clips = [_clip(x, plan) for x, plan in zip((keys, values), plans, strict=True)]
    arguments = (keys, values, *rotation, *clips, basis, *attention)
    if parse_plan(plans[0]).op_suffix:
        _require("append_attention_chunks", chunks.unsupported_step(*arguments, **variant))
        chunks.append_attention_chunks(*arguments, **variant)
    else:
        reason = append_attention.unsupported_reason(*arguments, **variant)
        _require("append_attention", reason)
        append_attention.append_attention(*arguments, **variant)


def _rotation(keys: Tensor, plan: str) -> tuple[Tensor | None, str | None]:
    if parse_plan(plan).rope is not None:
        return None, None
    dim = keys.shape[3]
    return keys.new_empty(1, keys.shape[2], dim), str(Rope("halves", 0, dim))


def _chunked_state(x: Tensor, plan: str) -> list[Tensor]:
    """The state after a prompt, with room for as many tokens in each segment as all have. Records
    the kernels that make it and that of `unpack`."""
    p, tokens = cast(ChunkedPlan, parse_plan(plan)), x.shape[2]
    tiles = -(-tokens // p.tile)
    index = [x.new_empty(1, tiles, p.tile, dtype=torch.int32) for _ in p.codecs]
    _require("reorder_chunks", chunks.unsupported_reorder(x, index, plan))
    chunks.reorder_chunks(x, index, plan)
    state = reorder_chunks_fake(x, index, plan)
    state += [x.new_empty(1, tiles * p.tile, dtype=torch.int32) for _ in p.codecs]
    _require("unpack_chunks", chunks.unsupported_unpack(state, tokens, plan, x.dtype))
    chunks.unpack_chunks(state, tokens, plan, x.dtype)
    return state


def _require(op: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"The kernel of kvpass::{op} cannot be used: {reason}.")
