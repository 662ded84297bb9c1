"""``kvpass::reorder_chunks`` and ``kvpass::extend_chunks``: a prompt's tokens in the order of their
bits (Cocktail, section 3.2), each level packed by a codec of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpass.cache.codec import Codec
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.ops.library import define

SCHEMA = "reorder_chunks(Tensor new, Tensor[] slots, str plan) -> Tensor[]"
EXTEND = "extend_chunks(Tensor(a!)[] state, Tensor new, Tensor[] slots, str plan) -> ()"


def reorder_chunks(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """Reference of ``kvpass::reorder_chunks``: a first prompt.

    Args:
        new: ``[B, H, T, D]``, floating; all tokens of the prompt.
        slots: for each level of the plan, then for exact tokens: which tokens go there, int32
            ``[B, tiles, TensorPlan.tile]``, each row's in rising order, -1 behind its end. Together
            they name every token once. Of a level, every row has whole groups of its codec.
        plan: a printed `TensorPlan` with levels.

    Returns:
        What `TensorPlan.made_names` names: exact tokens ``[B, H, C, D]``; codes
        ``[B, H, C, W]`` and params of each level (see `kvpass.cache.codec`; tokens ``[B, H, C, D]``
        and no params where it is the identity), ``C`` being as many as the slots of the segment;
        and ends, int32 ``[B, segments]``: how many tokens each row has in each segment.
    """
    return reordered(new, slots, plan, encoded)


def reordered(
    new: Tensor, slots: list[Tensor], plan: str, encode: Callable[[Codec, Tensor], Sequence[Tensor]]
) -> list[Tensor]:
    """`reorder_chunks`, with what makes codes and params of whole groups of tokens."""
    p = TensorPlan.parse(plan)
    *packed, exact = slots
    made = [_taken(new, exact)]
    for codec, places in zip(p.levels, packed, strict=True):
        made += encode(codec, _taken(new, places))
    return [*made, _counts(slots)]


def reorder_chunks_fake(new: Tensor, slots: list[Tensor], plan: str) -> list[Tensor]:
    """Shapes of `reorder_chunks`."""
    p = TensorPlan.parse(plan)
    (b, h, _, d), made = new.shape, []
    for codec, places in zip((p.codec, *p.levels), (slots[-1], *slots), strict=False):
        tiles, tile = places.shape[1:]
        words = d if codec.identity else codec.words(d)
        dtype = new.dtype if codec.identity else torch.int16
        made.append(new.new_empty((b, h, tiles * tile, words), dtype=dtype))
        if codec.identity:
            continue
        _, heads, groups, channels = codec.groups.shape(b, h, tile, d)
        shape = (
            (groups * tiles, channels) if codec.axis == "channel" else (channels, groups * tiles)
        )
        made.append(new.new_empty((b, heads, *shape), dtype=codec.param_dtype))
    return [*made, new.new_empty((b, len(slots)), dtype=torch.int32)]


def extend_chunks(state: list[Tensor], new: Tensor, slots: list[Tensor], plan: str) -> None:
    """Reference of ``kvpass::extend_chunks``: a later prompt's tokens join each row's segments.

    Args:
        state: what `TensorPlan.made_names` names, with room.
        new, slots, plan: as of `reorder_chunks`.
    """
    p = TensorPlan.parse(plan)
    *packed, exact = slots
    rows: list[list[int]] = state[-1].tolist()
    counts = _counts(slots)
    counted: list[list[int]] = counts.tolist()
    parts = iter(state[1:-1])
    for i, (codec, places) in enumerate(zip(p.levels, packed, strict=True)):
        starts, news = [row[i] for row in rows], [row[i] for row in counted]
        for part, run in zip(encoded(codec, _taken(new, places)), runs(codec), strict=True):
            _write(next(parts), part, run, starts, news)
    starts, news = [row[-1] for row in rows], [row[-1] for row in counted]
    _write(state[0], _taken(new, exact), (2, 1), starts, news)
    state[-1].add_(counts)


def extend_chunks_fake(state: list[Tensor], new: Tensor, slots: list[Tensor], plan: str) -> None:
    """Nothing is returned."""


def runs(codec: Codec) -> tuple[tuple[int, int], ...]:
    """Of each tensor of a level: the dimension of its tokens, and how many share an entry."""
    if codec.identity:
        return ((2, 1),)
    return ((2, 1), (2, codec.group) if codec.axis == "channel" else (3, 1))


def _taken(new: Tensor, slots: Tensor) -> Tensor:
    """The tokens in ``slots`` ``[B, tiles, tile]`` as ``[B, H, N, D]``; any token where there is
    none."""
    index = slots.flatten(1).clamp(min=0).long()
    return new.gather(2, index[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))


def encoded(codec: Codec, tokens: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a level, see `runs`."""
    return (tokens,) if codec.identity else codec.encode(tokens)


def _counts(slots: list[Tensor]) -> Tensor:
    return torch.stack([(s >= 0).sum((1, 2)) for s in slots], dim=1).to(torch.int32)


def _write(
    buffer: Tensor, part: Tensor, run: tuple[int, int], starts: list[int], counts: list[int]
) -> None:
    """The first ``counts`` tokens of each row of ``part`` go behind the first ``starts``."""
    dim, group = run[0] - 1, run[1]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        first, n = start // group, count // group
        buffer[row].narrow(dim, first, n).copy_(part[row].narrow(dim, 0, n))


def append_exact(state: list[Tensor], new: Tensor) -> None:
    """``kvpass::append`` where a plan has levels: new tokens go behind each row's exact ones.

    Args:
        state: exact tokens and ends.
        new: ``[B, H, n, D]``.
    """
    exact, ends = state
    # Without asking the device where.
    steps = torch.arange(new.shape[2], device=new.device)
    slots = ends[:, -1:] + steps
    rows = torch.arange(new.shape[0], device=new.device).unsqueeze(1)
    exact.transpose(1, 2).index_put_((rows, slots), new.transpose(1, 2))
    ends[:, -1] += new.shape[2]


def positions(state: list[Tensor], plan: TensorPlan) -> list[Tensor]:
    """The position of the token in each slot of each segment, int64 ``[B, C]``; -1 where there is
    none.

    Exact tokens without a place have come last, one behind the other.
    """
    found, ends = [], state[-1].long()
    total = ends.sum(1, keepdim=True)
    names = plan.state_names
    for i, name in enumerate(plan.place_names):
        exact, places = i == len(plan.levels), state[names.index(name)]
        room = state[names.index(name.replace("places", "codes"))].shape[2]
        end = ends[:, i : i + 1]
        slots = torch.arange(room, device=ends.device)
        known = torch.full((ends.shape[0], room), -1, device=ends.device)
        known[:, : places.shape[1]] = places[:, :room]
        if exact:
            known = torch.where(known < 0, total - end + slots, known)
        found.append(known.masked_fill(slots >= end, -1))
    return found


def unpack_chunks(state: list[Tensor], plan: TensorPlan, tokens: int, dtype: torch.dtype) -> Tensor:
    """``kvpass::unpack`` where a plan has levels: all tokens in their own order.

    Args:
        state, tokens, dtype: see `kvpass.ops.unpack.unpack`.
    """
    named = dict(zip(plan.state_names, state, strict=True))
    segments = [
        named[f"codes{i}"].to(dtype)
        if codec.identity
        else codec.decode(named[f"codes{i}"], named[f"params{i}"], dtype)
        for i, codec in enumerate(plan.levels)
    ]
    stored = torch.cat([*segments, named["codes"].to(dtype)], dim=2)
    places = torch.cat(positions(state, plan), dim=1)
    # Slots without a token go behind the last position.
    places = torch.where((places < 0) | (places >= tokens), tokens, places)
    slots = torch.arange(places.shape[1], device=places.device).expand_as(places)
    source = slots.new_zeros((places.shape[0], tokens + 1)).scatter(1, places, slots)[:, :tokens]
    index = source[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
    return stored.gather(2, index)


define(SCHEMA, reorder_chunks, reorder_chunks_fake)
define(EXTEND, extend_chunks, extend_chunks_fake)
