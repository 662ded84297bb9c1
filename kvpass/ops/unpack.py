"""``kvpass::unpack``: a packed cache tensor as the plain tensor it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.residency import TensorPlan
from kvpass.ops.append import read_window, row_ends
from kvpass.ops.library import define

SCHEMA = "unpack(Tensor[] state, SymInt tokens, str plan, ScalarType dtype) -> Tensor"


def unpack(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack``.

    Args:
        state: see `kvpass.ops.pack.empty_state`.
        tokens: logical length ``T`` of the handle; equal to the last of the segment ends.
        plan: a printed `TensorPlan`.
        dtype: of the result.

    Returns:
        ``[B, H, T, D]``.
    """
    p = TensorPlan.parse(plan)
    if p.codec.identity:
        return state[0][:, :, :tokens].to(dtype, copy=True)
    codes, params, window, ends = state
    packed = min(row_ends(ends)[0], tokens)
    out = window.new_empty((*window.shape[:2], tokens, window.shape[3]), dtype=dtype)
    if packed:
        used = slice_params(params, p, packed)
        out[:, :, :packed] = p.codec.decode(codes[:, :, :packed], used, dtype)
    out[:, :, packed:] = read_window(window, packed, tokens)
    return out


def slice_params(params: Tensor, plan: TensorPlan, packed: int) -> Tensor:
    """The params of the first ``packed`` tokens."""
    if plan.codec.axis == "channel":
        return params[:, :, : packed // plan.codec.group]
    return params[..., :packed]


def unpack_fake(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Shape of `unpack`."""
    like = state[0] if TensorPlan.parse(plan).codec.identity else state[2]
    return like.new_empty((like.shape[0], like.shape[1], tokens, like.shape[3]), dtype=dtype)


define(SCHEMA, unpack, unpack_fake)
