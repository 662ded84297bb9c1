"""``kvpass::attention``: softmax attention over packed keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpass.format.state import State
from kvpass.ops.library import define
from kvpass.ops.unpack import unpacked

ATTENTION_ARGUMENTS = (
    "(Tensor q, Tensor[] keys, Tensor[] values, Tensor? mask, float scale, str k_plan, str v_plan, "
    "Tensor? sinks=None, bool causal=False, int window=0, float softcap=0.0) -> Tensor"
)


class AttentionArguments(NamedTuple):
    """The arguments of ``kvpass::attention``.

    Attributes:
        q: ``[B, Hq, n, D]``; ``Hq`` a multiple of the KV heads ``H``.
        keys, values: states, see `kvpass.format.state.State`.
        mask: bool (True is visible) or additive, broadcastable to ``[B, Hq, n, L]`` (further
            columns are not looked at: a static cache's mask covers its whole buffer); None: all
            visible.
        scale: multiplies the scores.
        k_plan, v_plan: printed `TensorPlan`.
        sinks: ``[Hq]``, one more score per head, which takes weight and has no value (gpt-oss).
        causal: a query does not see later positions.
        window: a query sees this many positions, its own counted, and none before; 0: all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask; 0: they stay.
    """

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor | None
    scale: float
    k_plan: str
    v_plan: str
    sinks: Tensor | None = None
    causal: bool = False
    window: int = 0
    softcap: float = 0.0

    @property
    def states(self) -> tuple[State, State]:
        """Keys and values."""
        return State.of(self.keys, self.k_plan), State.of(self.values, self.v_plan)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_signature(
    *arguments: type[NamedTuple], returns: Any = Tensor
) -> Callable[[_Function], _Function]:
    """Declares, as `torch.library.triton_op` wants, that a function takes these arguments, one
    group behind the other, and what it ``returns``."""
    declared = [
        parameter.replace(annotation=get_type_hints(group)[name])
        for group in arguments
        for name, parameter in inspect.signature(group).parameters.items()
    ]

    def declare(function: _Function) -> _Function:
        vars(function)["__signature__"] = inspect.Signature(declared, return_annotation=returns)
        return function

    return declare


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::attention``: decode, then dense attention.

    The step's ``n`` tokens have been appended; of the ``T`` tokens stored it sees the last ``L``,
    see `TensorPlan.visible`: all of them unless a window slides. Query ``i`` stands at position
    ``T - n + i``.

    Args:
        args: see `AttentionArguments`.

    Returns:
        ``[B, Hq, n, Dv]``, contiguous, in the dtype of ``q``.
    """
    a = AttentionArguments(*args, **kwargs)
    return dense_attention(a, *decoded(a))


def decoded(a: AttentionArguments) -> list[Tensor]:
    """The visible keys and values, plain ``[B, H, L, D]``."""
    n, dtype = a.q.shape[2], a.q.dtype
    return [_dense(state, n, dtype) for state in a.states]


def dense_attention(a: AttentionArguments, k: Tensor, v: Tensor) -> Tensor:
    """`attention` over plain keys and values ``[B, H, L, D]``."""
    b, heads, n, _ = a.q.shape
    q, mask, sinks = grouped_query(a, *k.shape[1:3])
    # SDPA takes no mask of higher precision than the query's (ALiBi in float32, say).
    wide = mask is not None and mask.dtype not in (torch.bool, q.dtype)
    if a.softcap or a.sinks is not None or wide:
        # What SDPA has no arguments for; in float32 at least.
        high = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(high) @ k.to(high).transpose(2, 3) * a.scale
        weights = attention_weights(scores, mask, a.softcap, sinks)
        out = (weights @ v.to(high)).to(q.dtype)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=a.scale)
    return out.reshape(b, heads, n, v.shape[3]).contiguous()


def grouped_query(
    a: AttentionArguments, kv_heads: int, length: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The query, the mask of ``length`` tokens and the sinks, with the query heads that share a KV
    head as rows of one matrix; torch's ``enable_gqa`` would copy keys and values once per query
    head."""
    b, heads, n, d = a.q.shape
    groups = heads // kv_heads
    rows = b, kv_heads, groups * n
    mask, sinks = _bounded(a, length), a.sinks
    if mask is not None:
        mask = mask_rows(mask, kv_heads, groups, n)
    if sinks is not None:
        sinks = sinks.view(1, -1, 1, 1).expand(b, -1, n, 1).reshape(*rows, 1)
    return a.q.reshape(*rows, d), mask, sinks


def _dense(state: State, n: int, dtype: torch.dtype) -> Tensor:
    p, total = state.plan, state.length()
    if p.codec.identity and p.window_size is None and p.rope is None:
        return state.codes[:, :, :total]
    return unpacked(state, p.visible(total, n), dtype)


def _bounded(a: AttentionArguments, length: int) -> Tensor | None:
    """The first ``length`` columns of the mask, with what the bounds hide hidden too."""
    mask = None if a.mask is None else a.mask[..., :length]
    if not a.causal and not a.window:
        return mask
    n = a.q.shape[2]
    key = torch.arange(length, device=a.q.device)
    query = torch.arange(length - n, length, device=a.q.device).unsqueeze(1)
    seen = torch.ones(n, length, dtype=torch.bool, device=a.q.device)
    if a.causal:
        seen &= key <= query
    if a.window:
        seen &= key > query - a.window
    if mask is None:
        return seen.view(1, 1, n, length)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def attention_weights(
    scores: Tensor, mask: Tensor | None, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Softmax of scores ``[B, H, rows, T]``, which are capped and masked before; ``sinks`` are one
    more score ``[B, H, rows, 1]`` for each row. See `AttentionArguments`."""
    tokens = scores.shape[3]
    scores = attention_scores(scores, mask, softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)], dim=3)
    return torch.softmax(scores, dim=3)[..., :tokens]


def attention_scores(scores: Tensor, mask: Tensor | None, softcap: float) -> Tensor:
    """Scores ``[B, H, rows, T]``, capped and masked."""
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        return scores
    hidden = mask.dtype == torch.bool
    return scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask


def mask_rows(mask: Tensor, kv_heads: int, groups: int, n: int) -> Tensor:
    """A mask ``[B|1, Hq|1, n|1, T]`` for queries laid out as ``[B, H, groups * n, D]``."""
    if mask.shape[1] == 1:
        return mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)
    return mask.expand(-1, -1, n, -1).reshape(mask.shape[0], kv_heads, groups * n, mask.shape[3])


def attention_fake(*args: Any, **kwargs: Any) -> Tensor:
    """Shape of `attention`."""
    a = AttentionArguments(*args, **kwargs)
    return a.q.new_empty((*a.q.shape[:3], a.states[1].tokens.shape[3]))


define("attention" + ATTENTION_ARGUMENTS, attention, attention_fake)
