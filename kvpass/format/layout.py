"""`StateLayout`: which tensors a packed cache tensor consists of.

The one description of the state: what names, allocates, grows, copies, moves, crops, saves, counts
or passes these tensors to a kernel reads it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from kvpass.format.codec import Codec
from kvpass.format.dtypes import dtype_name

# A dimension: a number, or the name of a size that allocation gives a value.
Dim = int | str
# What may overwrite what a tensor holds of earlier tokens: nothing, since new tokens go behind
# them; a step that is longer than a decode step; or every step.
Overwritten = Literal["never", "prefill", "step"]


@dataclass(frozen=True)
class Field:
    """One tensor of the state, an attribute of `kvpass.tensor.packed.PackedKV` and of `State`.

    Attributes:
        name: the name of that attribute.
        shape: numbers, and names of sizes.
        dtype: None is that of the model.
        grows: the name in ``shape`` that stands for tokens there is room for, or None.
        group: consecutive tokens that share an entry along that dimension.
        exact: it holds tokens as they are, and follows their dtype.
        shared: one tensor for all layers of a cache.
        fill: the value in slots without a token; None: any.
        constant: calibrated, no token changes it.
        overwritten: see `Overwritten`; what else a step writes is behind the segments' ends.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype | None = None
    grows: str | None = None
    group: int = 1
    exact: bool = False
    shared: bool = False
    fill: int | None = None
    constant: bool = False
    overwritten: Overwritten = "never"

    @property
    def token_dim(self) -> int:
        """The dimension that grows."""
        assert self.grows is not None
        return self.shape.index(self.grows)

    def empty(self, like: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """An unwritten tensor on the device of ``like``, which has the model's dtype."""
        shape = [sizes[d] if isinstance(d, str) else d for d in self.shape]
        if self.grows is not None:
            shape[self.token_dim] //= self.group
        dtype = like.dtype if self.dtype is None else self.dtype
        if self.fill is not None:
            return like.new_full(shape, self.fill, dtype=dtype)
        return like.new_empty(shape, dtype=dtype)

    def room(self, tensor: Tensor) -> int:
        """Tokens that ``tensor`` has room for."""
        return tensor.shape[self.token_dim] * self.group

    def moved(self, old: Tensor, tokens: int, end: int | None = None) -> Tensor:
        """The content of ``old`` in a tensor with room for ``tokens``.

        If ``end`` is given, both are rings, in which token ``t`` is at slot ``t % room``: of the
        tokens before ``end``, those that both have room for move to their slots.
        """
        dim, room = self.token_dim, min(self.room(old), tokens)
        shape = (*old.shape[:dim], tokens // self.group, *old.shape[dim + 1 :])
        new = old.new_empty(shape) if self.fill is None else old.new_full(shape, self.fill)
        if end is None:
            self.tokens(new, 0, room).copy_(self.tokens(old, 0, room))
            return new
        first = max(0, end - room)
        entries = torch.arange(first // self.group, end // self.group, device=old.device)
        moved = old.index_select(dim, entries % old.shape[dim])
        return new.index_copy_(dim, entries % new.shape[dim], moved)

    def tokens(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """The entries of ``count`` tokens from slot ``first`` on, both multiples of `group`; a
        view."""
        return tensor.narrow(self.token_dim, first // self.group, count // self.group)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else dtype_name(self.dtype) + " "
        group = f"/{self.group}" if self.group > 1 else ""
        dims = [f"{d}{group}" if d == self.grows else str(d) for d in self.shape]
        return f"{self.name} {dtype}[{', '.join(dims)}]"


class StateLayout:
    """The fields of a state, in the order in which ops take its tensors: first those that a cache
    tensor has for itself, then those that all layers share."""

    def __init__(self, *fields: Field) -> None:
        self.own = tuple(f for f in fields if not f.shared)
        self.shared = tuple(f for f in fields if f.shared)
        self.fields = (*self.own, *self.shared)
        self.names = tuple(f.name for f in self.fields)
        self.own_names = tuple(f.name for f in self.own)

    @cached_property
    def overwritten(self) -> dict[Overwritten, tuple[str, ...]]:
        """The names of the fields in which a decode step, or a prefill, may overwrite earlier
        tokens."""
        every = tuple(f.name for f in self.fields if f.overwritten == "step")
        long = tuple(f.name for f in self.fields if f.overwritten != "never")
        return {"step": every, "prefill": long}

    def encoded(self, suffix: str = "") -> tuple[Field, ...]:
        """The fields of what `kvpass.format.quantize.encode` makes, in its order, of tokens whose
        room is ``capacity`` with this suffix."""
        return tuple(f for f in self.own if f.grows == f"capacity{suffix}" or f.constant)

    @cached_property
    def by_name(self) -> dict[str, Field]:
        """The fields by their names."""
        return {f.name: f for f in self.fields}

    @cached_property
    def tokens(self) -> str:
        """The name of a field with the shape ``[B, H, ..., D]`` and the dtype of tokens: one that
        holds them as they are."""
        return next(f.name for f in self.fields if f.exact)

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields))

    def __contains__(self, name: object) -> bool:
        return name in self.by_name

    def __getitem__(self, name: str) -> Field:
        return self.by_name[name]


def codec_fields(codec: Codec, suffix: str, overwritten: Overwritten = "never") -> Iterator[Field]:
    """Words and their scales and minima, of tokens whose room is ``capacity`` with this suffix."""
    grows, name = f"capacity{suffix}", f"qparams{suffix}"
    field = partial(Field, grows=grows, overwritten=overwritten)
    yield field(f"codes{suffix}", ("batch", "heads", grows, f"words{suffix}"), torch.int16)
    if codec.static_ranges:
        yield Field(name, ("batch", "heads", 1, "channels"), codec.qparam_dtype, constant=True)
    elif codec.axis == "channel":
        shape: tuple[Dim, ...] = ("batch", "heads", grows, "channels")
        yield field(name, shape, codec.qparam_dtype, group=codec.group)
    else:
        shape = ("batch", f"group_heads{suffix}", f"groups{suffix}", grows)
        yield field(name, shape, codec.qparam_dtype)


def codec_sizes(codec: Codec, suffix: str, heads: int, channels: int) -> dict[str, int]:
    """The sizes that the shapes of `codec_fields` name."""
    if codec.identity:
        return {}
    found = {f"words{suffix}": codec.words.count(channels)}
    if codec.axis == "token":
        _, group_heads, _, groups = codec.groups.shape(1, heads, 1, channels)
        found |= {f"group_heads{suffix}": group_heads, f"groups{suffix}": groups}
    return found
