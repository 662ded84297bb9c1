"""The ops of cache tensors whose tokens are spread over processes, see
`kvpass.format.sharded_plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kvpass._torch import assert_async
from kvpass.errors import RankError
from kvpass.format.retention import MAX_STEP
from kvpass.format.shard import Shard
from kvpass.format.sharded_plan import ShardedChunks, ShardedPlan
from kvpass.format.state import State, empty_state
from kvpass.ops.append import APPEND_ARGUMENTS, join
from kvpass.ops.attention_partial import merge as merge
from kvpass.ops.cos_sin import rotated
from kvpass.ops.library import define, returns_nothing
from kvpass.ops.pack import SCHEMA as PACK
from kvpass.ops.pack import fill
from kvpass.ops.unpack import SCHEMA as UNPACK
from kvpass.ops.unpack import unpacked

_SUFFIX = ShardedPlan.op_suffix
ENDS = "own_ends(Tensor ends, str plan) -> Tensor"
MASK = (
    "own_mask(Tensor? mask, Tensor ends, str plan, SymInt queries, SymInt tokens, bool causal, "
    "int window) -> Tensor"
)

SAME = "same_sums(Tensor x, Tensor sums, int parts, float tolerance) -> Tensor"


def sharded(state: Sequence[Tensor], plan: str) -> tuple[State, ShardedPlan]:
    """The state by its names, and the plan."""
    named = State.of(state, plan)
    return named, cast(ShardedPlan, named.plan)


def own_state(s: State, p: ShardedPlan | ShardedChunks) -> State:
    """The state of the own tokens as a cache tensor of its own; it shares all but its ends."""
    ends = p.own_ends(s.segment_ends)
    names = p.layout.names[: len(s.tensors)]
    return State([ends if n == "segment_ends" else s[n] for n in names], p.own)


def own_ends(ends: Tensor, plan: str) -> Tensor:
    """Reference of ``kvpass::own_ends``: where segments end among the own tokens. An op of its own,
    see `kvpass.ops.length.length`.

    Args:
        ends: int32 ``[B, segments]`` of the whole sequence.
        plan: a printed `ShardedPlan`.

    Returns:
        int32 ``[B, segments]``.
    """
    _, p = sharded((), plan)
    return p.own_ends(ends)


def own_mask(
    mask: Tensor | None,
    ends: Tensor,
    plan: str,
    queries: int,
    tokens: int,
    causal: bool,
    window: int,
) -> Tensor:
    """Reference of ``kvpass::own_mask``: a mask of the own tokens, see `Sharded.columns`.

    Args:
        mask: of all ``tokens``, see `kvpass.ops.attention.AttentionArguments`; None: all visible.
        ends: ``segment_ends``, the last of which is that of the whole sequence, after the step's
            tokens have joined.
        plan: a printed plan of a part.
        queries: the step's tokens, the last of all.
        tokens: all of them.
        causal, window: see `kvpass.ops.attention.AttentionArguments`.

    Returns:
        ``mask``, with the columns of the own tokens, and what the bounds hide hidden; without one
        bool ``[1, 1, n, T]``.
    """
    _, p = sharded((), plan)
    numbers = torch.arange(tokens, device=ends.device)
    # Columns behind the own tokens are not looked at.
    position = p.columns(numbers).clamp(max=max(tokens - 1, 0))
    if mask is not None:
        mask = mask.index_select(3, position) if mask.shape[3] > 1 else mask
        if not (causal or window):
            return mask.contiguous()
    # Without asking the device for the position.
    query = (ends[:1, -1:] - queries + torch.arange(queries, device=ends.device)).view(-1, 1)
    seen = torch.ones(queries, tokens, dtype=torch.bool, device=ends.device)
    if causal:
        seen &= position <= query
    if window:
        seen &= position > query - window
    if mask is None:
        return seen.view(1, 1, queries, tokens)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def own_mask_fake(
    mask: Tensor | None,
    ends: Tensor,
    plan: str,
    queries: int,
    tokens: int,
    causal: bool,
    window: int,
) -> Tensor:
    """Shape of `own_mask`."""
    bounds = (1, 1, queries, tokens)
    if mask is None:
        return ends.new_empty(bounds, dtype=torch.bool)
    if not (causal or window):
        return mask.new_empty(mask.shape)
    return mask.new_empty(torch.broadcast_shapes(mask.shape, bounds))


def prompt_sums(new: Tensor) -> Tensor:
    """A number for each sequence and head by which other prompts ``[B, H, T, D]`` are told:
    float32 ``[B, H, 1, 1]``."""
    return new.float().sum((2, 3), keepdim=True)


def with_sums(partial: Tensor, q: Tensor) -> Tensor:
    """What ``kvpass::attention_partial`` gives, and behind it for each query of ``q`` a number by
    which other queries are told: float32 ``[B, Hq, n, Dv + 2]``."""
    return torch.cat([partial, q.float().sum(3, keepdim=True)], dim=3)


def same_sums(x: Tensor, sums: Tensor, parts: int, tolerance: float) -> Tensor:
    """Reference of ``kvpass::same_sums``: ``x``, a copy of it.

    Args:
        x: any tensor.
        sums: ``[parts * B, ..., N]``, those of all processes; the last ones are looked at.
        parts: how many processes there are.
        tolerance: how far the sums may be apart, relative to the largest: they are not computed
            alike on processors of different kinds.

    Raises:
        RankError: on a CPU, if processes have others; on a GPU it fails later.
    """
    every = sums[..., -1].unflatten(0, (parts, -1))
    least, most = every.aminmax(dim=0)
    same = ((most - least) <= tolerance * every.abs().amax()).all()
    if same.device.type == "cpu" and not bool(same):
        raise RankError(
            f"The {parts} ranks that share a cache do not read the same tokens; all of them need "
            "the same prompts, and the same seed where they sample."
        )
    if same.device.type != "cpu":
        assert_async(same)
    return x.clone()


class OwnStep(NamedTuple):
    """What a step of new tokens means for a part.

    Attributes:
        own: the part's new tokens ``[B, H, n, D]``.
        cos_sin: theirs, if there are any.
        packed_end: where packed tokens end among the own ones after the step.
        ends: where all segments end after it, of the whole sequence.
    """

    own: Tensor
    cos_sin: Tensor | None
    packed_end: int
    ends: list[int]


def own_step(s: State, p: ShardedPlan, new: Tensor, cos_sin: Tensor | None) -> OwnStep:
    """What the tokens ``new`` ``[B, H, n, D]`` behind those of a state mean for it: as
    `kvpass.ops.append.append` has it, but for the place."""
    ends, n = s.row_ends, new.shape[2]
    past, total = ends[-1], ends[-1] + n
    if p.codec.identity:
        packed, after = 0, [total]
    else:
        sinks = min(p.sinks, total)
        begun = max(past, sinks)
        packed = max(ends[-2], sinks)
        seen = begun if n <= MAX_STEP else total
        packed += p.retention.due(seen - packed, packed - p.sinks)
        after = [*([sinks] if p.own.sinks else []), packed, total]
    rows = None if cos_sin is None else p.shard.select(cos_sin, 1, past)
    return OwnStep(p.shard.select(new, 2, past), rows, p.shard.own(packed), after)


def set_ends(s: State, ends: Sequence[int]) -> None:
    """Writes the ends of all sequences."""
    s.segment_ends.copy_(torch.tensor(ends, dtype=torch.int32))


def append_shard(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """Reference of ``kvpass::append_shard``, see `kvpass.ops.append.append`: of the new tokens, the
    own ones join. Every process packs what is due of its own tokens."""
    s, p = sharded(state, plan)
    step = own_step(s, p, new, cos_sin)
    join(own_state(s, p), rotated(step.own, step.cos_sin, rope), step.packed_end)
    set_ends(s, step.ends)


class OwnPrompt(NamedTuple):
    """What a first prompt means for a part.

    Attributes:
        state: an empty one for the own tokens, with their ends.
        packed: how many of them are packed behind the sinks.
        ends: where all segments end, of the whole sequence.
    """

    state: State
    packed: int
    ends: list[int]


def own_prompt(p: ShardedPlan, new: Tensor) -> OwnPrompt:
    """What a first prompt ``new`` ``[B, H, T, D]`` means for a part of it."""
    tokens, own = new.shape[2], p.shard.own
    sinks = torch.sym_min(p.sinks, tokens)
    packed = sinks + p.packed(tokens)
    count = own(packed) - torch.sym_min(p.own.sinks, tokens)
    like = new[:, :, :1].expand(-1, -1, own(tokens), -1)
    state = empty_state(like, p.own, count, window=p.ring_slots(tokens - p.sinks))
    after = [*([sinks] if p.own.sinks else []), *([] if p.codec.identity else [packed]), tokens]
    return OwnPrompt(state, count, after)


def pack_shard(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """Reference of ``kvpass::pack_shard``, see `kvpass.ops.pack.pack`: the own tokens of a first
    prompt ``[B, H, T, D]``."""
    _, p = sharded((), plan)
    state, packed, ends = own_prompt(p, new)
    fill(state, p.shard.select(new, 2), packed, ranges)
    set_ends(state, ends)
    return state.tensors


def pack_shard_fake(
    new: Tensor, plan: str, ranges: Tensor | None = None, clip: Tensor | None = None
) -> list[Tensor]:
    """Shapes of `pack_shard`."""
    _, p = sharded((), plan)
    return own_prompt(p, new).state.tensors


def unpack_shard(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Reference of ``kvpass::unpack_shard``, see `kvpass.ops.unpack.unpack`.

    Returns:
        The own tokens ``[B, H, N, D]``, zeros behind them and where others have their
        `Shard.head`; ``N`` is `Shard.share`.
    """
    s, p = sharded(state, plan)
    out = s.tokens.new_zeros(_shares(s, p.shard, tokens), dtype=dtype)
    count, begin = p.shard.own(tokens), p.shard.first - p.shard.head
    out[:, :, begin : begin + count] = unpacked(own_state(s, p), count, dtype)
    return out


def unpack_shard_fake(state: list[Tensor], tokens: int, plan: str, dtype: torch.dtype) -> Tensor:
    """Shape of `unpack_shard`."""
    s, p = sharded(state, plan)
    return s.tokens.new_empty(_shares(s, p.shard, tokens), dtype=dtype)


def _shares(s: State, shard: Shard, tokens: int) -> tuple[int, int, int, int]:
    rows, heads, _, channels = s.tokens.shape
    return rows, heads, shard.share(tokens), channels


def in_order(parts: Tensor, tokens: int, plan: str) -> Tensor:
    """All ``tokens`` from what `unpack_shard` gives on every process, see `Shard.in_order`."""
    _, p = sharded((), plan)
    return p.shard.in_order(parts, tokens)


define(f"append{_SUFFIX}{APPEND_ARGUMENTS}", append_shard, returns_nothing)
define(PACK.replace("(", f"{_SUFFIX}(", 1), pack_shard, pack_shard_fake)
define(UNPACK.replace("(", f"{_SUFFIX}(", 1), unpack_shard, unpack_shard_fake)
define(ENDS, own_ends, lambda ends, plan: torch.empty_like(ends))
define(MASK, own_mask, own_mask_fake)
define(SAME, same_sums, lambda x, sums, parts, tolerance: torch.empty_like(x))
