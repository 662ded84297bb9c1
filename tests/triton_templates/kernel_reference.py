"""What kernels are compared with: states in poisoned memory, dense attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

import kvpass.ops.append
import kvpass.ops.attention
import kvpass.ops.pack
import kvpass.ops.unpack  # noqa: F401
from kvpass.format.parse import parse_plan
from kvpass.format.state import State

# Params whose scale and minimum are both NaN, and words that are no valid leftover of a test.
NAN_PARAMS = {torch.int32: 0x7E007E00, torch.int16: 0x7F7F}
POISON_WORD = 0x5A5A


# More arguments of attention with 8 query heads; each test adds its own.
VARIANTS = {
    "causal": {"causal": True},
    "window": {"window": 100},
    "causal-window": {"causal": True, "window": 37},
    "window-of-one": {"causal": True, "window": 1},
    "wide-window": {"causal": True, "window": 10**6},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": torch.linspace(-3, 5, 8)},
    "sinks-bf16": {"sinks": torch.linspace(-3, 5, 8).bfloat16()},
    "sinks-fp64": {"sinks": torch.linspace(-3, 5, 8).double()},
}


def keys_like(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0):
    """Random ``[B, H, T, D]`` whose channels have different ranges and offsets, as keys do."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, heads, tokens, dim, generator=g)
    spread = 0.3 + 3 * torch.rand(batch, heads, 1, dim, generator=g)
    return (x * spread + torch.randn(batch, heads, 1, dim, generator=g)).to(dtype)


def live_slots(state: State, new: int = 0) -> tuple[Tensor, Tensor]:
    """The slots of the packed segment, and of the exact window's ring, that hold the tokens which a
    step of ``new`` tokens sees once it is stored; oldest first."""
    p, ends = state.plan, state.segment_ends[0].tolist()
    packed, total = ends[0] if p.codec.identity else ends[-2], ends[-1]
    first = max(total - p.visible(total, new), min(p.sinks, total))
    slots = (torch.arange(first, max(first, packed)) - p.sinks) % state.capacity
    exact = torch.arange(max(first, packed), total)
    return slots, exact if p.codec.identity else exact % state.window.shape[2]


def poison(tensors: list[Tensor], plan: str, new: int = 0) -> list[Tensor]:
    """Overwrites, in place, everything that no token of `live_slots` lives in."""
    state = State.of(tensors, plan)
    slots, exact = live_slots(state, new)
    dead = torch.ones(state.capacity, dtype=torch.bool)
    dead[slots] = False
    if state.plan.codec.identity:
        state.codes[:, :, dead] = float("nan")
        return tensors
    state.codes[:, :, dead] = POISON_WORD
    field = state.layout["qparams"]
    groups = dead.view(-1, field.group).all(1)
    state.qparams.movedim(field.token_dim, 0)[groups] = NAN_PARAMS[state.qparams.dtype]
    unused = torch.ones(state.window.shape[2], dtype=torch.bool)
    unused[exact] = False
    state.window[:, :, unused] = float("nan")
    if "sinks" in state:
        state.sinks[:, :, int(state.segment_ends[0, 0]) :] = float("nan")
    return tensors


def spoil(tensors: list[Tensor], plan: str, stop: int) -> None:
    """Makes packed tokens before ``stop``, whole groups of them, decode to NaN."""
    state = State.of(tensors, plan)
    if state.plan.codec.identity:
        state.codes[:, :, :stop] = float("nan")
    else:
        whole = stop // state.layout["qparams"].group * state.layout["qparams"].group
        qparams = state.layout["qparams"].tokens(state.qparams, 0, whole)
        qparams.fill_(NAN_PARAMS[qparams.dtype])


def kivi(bits: int, group: int = 32) -> tuple[str, str]:
    """Printed plans of keys and values; ``group`` tokens or channels share a scale."""
    return (
        f"int{bits}.channel{group}/window=0,pack_every=128",
        f"int{bits}.token{group}/window=128,pack_every=1",
    )


def states(plans, tokens, *, dim=64, heads=1, batch=1, dtype=torch.float16, steps=()):
    """Poisoned keys and values after a prompt of ``tokens`` and ``steps`` of new tokens; what the
    last of them sees is intact.

    ``dim``: channels of keys and values, or of each.
    """
    made = []
    dims = dim if isinstance(dim, tuple) else (dim, dim)
    for seed, (plan, dim) in enumerate(zip(plans, dims, strict=True)):
        state = torch.ops.kvpass.pack(keys_like(batch, heads, tokens, dim, dtype, seed), plan)
        for i, n in enumerate(steps):
            new = keys_like(batch, heads, n, dim, dtype, 10 + 2 * i + seed)
            torch.ops.kvpass.append(state, new, plan)
        made.append(poison(state, plan, steps[-1] if steps else 0))
    return made


def written(tensors: list[Tensor], plan: str) -> list[Tensor]:
    """The parts of a state that tokens live in, to be compared bit for bit."""
    state = State.of(tensors, plan)
    slots, exact = live_slots(state)
    parts = [state.codes[:, :, slots], state.segment_ends]
    if state.plan.codec.identity:
        return parts
    field = state.layout["qparams"]
    groups = (slots // field.group).unique() if field.group > 1 else slots
    parts += [state.qparams.index_select(field.token_dim, groups), state.window[:, :, exact]]
    if "sinks" in state:
        parts.append(state.sinks[:, :, : int(state.segment_ends[0, 0])])
    if "retained" in state:
        parts += [state.retained, state.positions]
    return parts


def dense_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention in float64 over the decoded cache."""
    total, n = State.of(keys, k_plan).length(), q.shape[2]
    tokens = parse_plan(k_plan).visible(total, n)
    k = torch.ops.kvpass.unpack(keys, tokens, k_plan, torch.float32).double()
    v = torch.ops.kvpass.unpack(values, tokens, v_plan, torch.float32).double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q.double() @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[..., :tokens], float("-inf"))
    elif mask is not None:
        scores = scores + mask[..., :tokens].double()
    key, query = torch.arange(tokens), torch.arange(tokens - n, tokens).unsqueeze(1)
    if causal:
        scores = scores.masked_fill(key > query, float("-inf"))
    if window:
        scores = scores.masked_fill(key <= query - window, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A row that sees nothing is zero, as in torch's safe softmax.
    return scores.softmax(-1).nan_to_num(0.0)[..., :tokens] @ v


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got.double() - expected).norm() / expected.norm())
