"""What one attention layer launches, recorded for inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.errors import KernelError
from kvpass.ops.pack import pack_fake
from lowering import append, attention, pack
from lowering.launch import Launch, record_launches

# Sizes that do not change the kernels: tokens of the prompt, and KV heads.
_TOKENS = 4096
_KV_HEADS = 8


def layer_launches(
    k_plan: str,
    v_plan: str,
    *,
    key_dim: int,
    value_dim: int,
    heads_per_group: int,
    dtype: torch.dtype = torch.float16,
) -> list[Launch]:
    """What a layer launches for a prompt and for one decode step. Call it under fake tensors.

    Args:
        k_plan, v_plan: printed plans.
        key_dim, value_dim: channels of a head.
        heads_per_group: query heads that share a KV head.
        dtype: of the model.

    Raises:
        KernelError: if a kernel declines these arguments.
    """
    with record_launches() as launches:
        keys = _state(k_plan, key_dim, dtype)
        values = _state(v_plan, value_dim, dtype)
        heads = _KV_HEADS * heads_per_group
        q = keys[0].new_empty(1, heads, 1, key_dim, dtype=dtype)
        _require("attention", attention.supports(q, keys, values, None, 1.0, k_plan, v_plan))
        attention.attention(q, keys, values, None, 1.0, k_plan, v_plan)
    return launches


def _state(plan: str, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """The state after a prompt and a decode step, whose kernels are recorded."""
    x = torch.empty(1, _KV_HEADS, _TOKENS, dim, dtype=dtype, device="cuda")
    _require("pack", pack.supports(x, plan))
    pack.pack(x, plan)
    state = pack_fake(x, plan)
    append.append(state, x.new_empty(1, _KV_HEADS, 1, dim), plan)
    return state


def _require(op: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"The kernel of kvpass::{op} cannot be used: {reason}.")
