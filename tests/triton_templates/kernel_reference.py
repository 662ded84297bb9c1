"""What kernels are compared with: states in poisoned memory, dense attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

import kvpass.ops.append
import kvpass.ops.attention
import kvpass.ops.pack
import kvpass.ops.unpack  # noqa: F401
from kvpass.cache.residency import TensorPlan

# int32 params whose scale and minimum are both NaN, and words that are no valid leftover of a test.
NAN_PARAMS = 0x7E007E00
POISON_WORD = 0x5A5A


def keys_like(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0):
    """Random ``[B, H, T, D]`` whose channels have different ranges and offsets, as keys do."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, dim, generator=g)
    spread = 0.3 + 3 * torch.rand(batch, heads, 1, dim, generator=g)
    return (x * spread + torch.randn(batch, heads, 1, dim, generator=g)).to(dtype)


def live_slots(state: list[Tensor], plan: str) -> Tensor:
    """The ring's slots that hold the exact tokens, oldest first."""
    packed, total = state[-1][0].tolist()
    return torch.arange(packed, total) % TensorPlan.parse(plan).ring


def poison(state: list[Tensor], plan: str) -> list[Tensor]:
    """Overwrites, in place, everything that no token of the state lives in."""
    p = TensorPlan.parse(plan)
    packed = int(state[-1][0, 0])
    if p.codec.identity:
        state[0][:, :, packed:] = float("nan")
        return state
    state[0][:, :, packed:] = POISON_WORD
    if p.codec.axis == "channel":
        state[1][:, :, packed // p.codec.group :] = NAN_PARAMS
    else:
        state[1][..., packed:] = NAN_PARAMS
    dead = torch.ones(p.ring, dtype=torch.bool)
    dead[live_slots(state, plan)] = False
    state[2][:, :, dead] = float("nan")
    return state


def kivi(bits: int, group: int = 32) -> tuple[str, str]:
    """Printed plans of keys and values; ``group`` tokens or channels share a scale."""
    return (
        f"int{bits}.channel{group}/window=0,flush=128",
        f"int{bits}.token{group}/window=128,flush=1",
    )


def states(plans, tokens, *, dim=64, heads=1, batch=1, dtype=torch.float16, steps=()):
    """Poisoned keys and values after a prompt of ``tokens`` and ``steps`` of new tokens.

    ``dim``: channels of keys and values, or of each.
    """
    made = []
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    for seed, (plan, dim) in enumerate(zip(plans, dims, strict=True)):
        state = torch.ops.kvpass.pack(keys_like(batch, heads, tokens, dim, dtype, seed), plan)
        for i, n in enumerate(steps):
            new = keys_like(batch, heads, n, dim, dtype, 10 + 2 * i + seed)
            torch.ops.kvpass.append(state, new, plan)
        made.append(poison(state, plan))
    return made


def written(state: list[Tensor], plan: str) -> list[Tensor]:
    """The parts of a state that tokens live in, to be compared bit for bit."""
    p = TensorPlan.parse(plan)
    packed = int(state[-1][0, 0])
    if p.codec.identity:
        return [state[0][:, :, :packed], state[-1]]
    if p.codec.axis == "channel":
        params = state[1][:, :, : packed // p.codec.group]
    else:
        params = state[1][..., :packed]
    return [state[0][:, :, :packed], params, state[2][:, :, live_slots(state, plan)], state[-1]]


def dense_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
) -> Tensor:
    """Attention in float64 over the decoded cache."""
    tokens = int(keys[-1][0, -1])
    k = torch.ops.kvpass.unpack(keys, tokens, k_plan, torch.float32).double()
    v = torch.ops.kvpass.unpack(values, tokens, v_plan, torch.float32).double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.double() @ k.transpose(2, 3) * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.double()
    # A row that sees nothing is zero, as in torch's safe softmax.
    return scores.softmax(-1).nan_to_num(0.0) @ v


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - expected).norm() / expected.norm())
