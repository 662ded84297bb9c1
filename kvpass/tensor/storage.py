"""`PackedStorage`: the state of a cache tensor; it grows, and failed steps are rolled back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from kvpass._torch import mark_dynamic, storage_key
from kvpass.errors import CacheFullError, StaleHandleError
from kvpass.format.channels import ChannelBasis
from kvpass.format.layout import Field
from kvpass.format.retention import MAX_STEP
from kvpass.format.state import State, StateTensors
from kvpass.ops.ring import read_ring, write_ring
from kvpass.ops.unpack import read_packed
from kvpass.tensor.branches import Branch, branch_of, ends_of
from kvpass.tensor.copies import copied
from kvpass.tensor.line import Line
from kvpass.tensor.meta import Inner, Meta, meta_of
from kvpass.tensor.rows import Rows, mapped, own_bytes, token_dim

_COMPUTED = dict.fromkeys(("_state", "_meta", "_rooms", "_reserved"))


class PackedStorage(StateTensors, Tensor):
    """The tensors that a `PackedKV` holds: they grow, are cropped, and are rolled back.

    Attributes:
        written: where the last segment ends, as the host knows it.
        basis: how ``codes`` and ``window`` hold the channels of each head, None if in
            the model's own.
    """

    written: int
    basis: ChannelBasis | None
    # Shared by all handles on one storage, and the number of its steps when this one was made.
    _line: Line
    _born: int
    # What is computed of the inner tensors, until one of them is replaced.
    _state: list[Tensor] | None = None
    _meta: Meta | None = None
    _rooms: tuple[int, ...] | None = None
    _reserved: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        found = {name: x for name, x in self.__dict__.items() if name not in _COMPUTED}
        if self.branches or self._line.rows is not None:
            self.check()
            copied = {n: x.clone() for n, x in found.items() if isinstance(x, Tensor)}
            found |= {**copied, "_line": Line(), "_born": 0}
        return found

    def hold(self, name: str, tensor: Tensor) -> None:
        """Puts ``tensor`` in the place of the inner tensor ``name``."""
        setattr(self, name, tensor)
        self.__dict__.update(_COMPUTED)

    @property
    def meta(self) -> Meta:
        """What compiled code relies on."""
        if self._meta is None:
            plan, batch, inner = self.plan, self.shape[0], []
            for name, tensor in zip(plan.layout.names, self.state, strict=True):
                # All begin with the sequences, or, where these share a row, with 1.
                shape: list[int | str | None] = list(tensor.shape)
                shape[0] = "batch" if shape[0] == batch else shape[0]
                if name in plan.growing:
                    shape[plan.growing[name]] = None
                inner.append(Inner(tuple(shape), tensor.dtype))
            self._meta = meta_of(plan, self.dtype, self.basis, tuple(inner))
        return self._meta

    @property
    def rooms(self) -> tuple[int, ...]:
        """How many tokens there is room for in each field that grows."""
        # That which a branch shares may grow in a step of another one.
        if self._rooms is None or self._line.branch is not None:
            growing = self.plan.growing.items()
            self._rooms = tuple(getattr(self, name).shape[dim] for name, dim in growing)
        return self._rooms

    @property
    def state(self) -> list[Tensor]:
        """The inner tensors in the order in which ops take them."""
        if self._state is None:
            self._state = [getattr(self, name) for name in self.plan.layout.names]
        return self._state

    @property
    def own(self) -> list[Tensor]:
        """The inner tensors but for those that all layers share."""
        return self.state[: len(self.plan.layout.own)]

    @property
    def named(self) -> State:
        """The inner tensors by name."""
        return State(self.state, self.plan)

    @property
    def stale(self) -> bool:
        """Whether a later step has extended the storage."""
        return self._line.steps != self._born

    @property
    def branches(self) -> Sequence[Branch]:
        """What of it shares memory with copies: its own tensors, and those that layers share."""
        # Asked for each tensor in each step.
        if self._line.branch is None and self.plan.rope is None:
            return ()
        found = (self._line.branch, branch_of(self.__dict__.get("cos_sin")))
        return [branch for branch in found if branch is not None]

    @property
    def held(self) -> dict[object, int]:
        """Bytes in memory for it, by what holds them; what shares memory has that in common."""
        every = [*self.state, *(t for branch in self.branches for t in branch.held)]
        found: dict[object, int] = {storage_key(t): t.numel() * t.element_size() for t in every}
        if (rows := self._line.rows) is not None:
            stored = ends_of(self.plan, self.segment_ends).stored
            rows = rows.after(stored, self.written)
            for field, tensor in zip(self.plan.layout.fields, self.state, strict=True):
                if (prefix := mapped(tensor)) is not None:
                    own = rows.own(field, tensor, stored)
                    found[storage_key(tensor)] = own_bytes(tensor, token_dim(field), own)
                    found[prefix] = prefix.nbytes
        return found

    def check(self) -> None:
        """Refuses a handle on storage that a later step has extended; the tensors of another one
        hold its tokens from now on, until a branch is used with which it shares them.

        Raises:
            StaleHandleError: if this is one.
        """
        if self._line.steps != self._born:
            raise StaleHandleError(
                f"This cache tensor of {self.shape[2]} tokens is stale: a later step has extended "
                "its storage. Use the tensor that the cache holds now, or clone() before the step."
            )
        for branch in self.branches:
            branch.trunk.enter(branch)

    @property
    def reserved(self) -> int:
        """Up to how many `written` tokens a decode step needs no `reserve`; -1 where each one
        does."""
        if self._line.branch is not None:
            # What a step replaces is kept for the others.
            return -1
        if self._reserved is None:
            plan = self.plan
            if plan.room is not None:
                self._reserved = plan.room
            elif plan.window_size is not None:
                slides = plan.capacity(plan.window_size + MAX_STEP) <= self.capacity
                self._reserved = sys.maxsize if slides else -1
            else:
                # At most all tokens are packed.
                self._reserved = -1 if plan.grows else self.capacity
        return self._reserved

    def reserve(self, new: int, after: int | None = None) -> None:
        """Makes room for a step of ``new`` tokens, after which ``after`` are left (by default
        nothing slides out): capacity grows by a quarter at least.

        Raises:
            CacheFullError: if a static cache has no room for them.
        """
        plan = self.plan
        after = self.shape[2] + new if after is None else after
        if plan.room is not None:
            if self.written + new > plan.room:
                raise CacheFullError(
                    f"The static cache has room for {plan.room} tokens and holds {self.written}; "
                    f"{new} more do not fit. Make it with a larger max_cache_len."
                )
        elif plan.window_size is not None:
            if plan.capacity(after) > self.capacity:
                self.grow("capacity", plan.capacity(after + after // 4))
        else:
            self._reserve_packed(new)
        if (branch := self._line.branch) is not None:
            branch.keep(self.written + new)

    def _reserve_packed(self, new: int) -> None:
        """`reserve` where no window slides."""
        tokens, plan = self.shape[2], self.plan
        if plan.codec.identity:
            needed = tokens + new
        else:
            self._reserve_window(new)
            counted = (tokens if new <= MAX_STEP else tokens + new) - plan.sinks
            retention = plan.retention
            needed = counted - (retention.window if retention.pivotal else retention.stay(counted))
        self._reserve_capacity(needed)

    def _reserve_capacity(self, needed: int) -> None:
        if needed > self.capacity:
            more = max(self.capacity // 4, 2 * self.plan.tile)
            self.grow("capacity", self.plan.capacity(max(needed, self.capacity + more)))

    def grow(self, grows: str, tokens: int) -> None:
        """Moves the fields that grow as ``grows`` says to tensors with room for ``tokens``."""
        end, new = self._ring_end(grows), dict[str, Tensor]()
        if grows == "capacity" and self._line.rows is not None:
            stored = ends_of(self.plan, self.segment_ends).stored
            old, names = self._line.rows, self.plan.layout.names
            state, rows = copied(self, self.written, old, None, stored, tokens)
            # Exact tokens, too, leave what they mapped.
            left = [n for n in names if mapped(getattr(self, n)) is not None]
            new = {n: x for n, x in zip(names, state, strict=True) if n in left}
            if rows is None:
                new = {n: x for n, x in new.items() if self.plan.layout[n].grows is None}
            self._line.rows = rows
        for field in self.plan.layout.fields:
            if field.grows == grows or field.name in new:
                self._move(field, tokens, end, new.get(field.name))

    def _move(
        self, field: Field, tokens: int, end: int | None = None, new: Tensor | None = None
    ) -> None:
        tensor = getattr(self, field.name)
        new = field.moved(tensor, tokens, end) if new is None else new
        trunks = [b.trunk for b in self.branches if field.name in b.trunk.names]
        for trunk in trunks:
            trunk.grow(field.name, new)
        self.hold(field.name, tensor if trunks else new)

    def _ring_end(self, grows: str) -> int | None:
        """The end of the tokens in fields that grow so and are rings; None: they are none."""
        if grows == "window":
            return self.written
        if self.plan.window_size is None:
            return None
        ends = self.row_ends
        return ends[0] if grows == "capacity" else ends[-1]

    def widened(self, like: Sequence[PackedStorage]) -> Self:
        """A copy with the most room that any of ``like`` has."""
        copy = cast(Self, self.clone())
        for field in self.plan.layout.fields:
            if field.grows is not None:
                room = max(field.room(getattr(other, field.name)) for other in like)
                copy._move(field, room, copy._ring_end(field.grows))
        return copy

    def joins(self, others: Sequence[PackedStorage]) -> bool:
        """Whether ``others``, of the same plan and length, have their boundaries at the same
        tokens, and the same constants."""
        constant = [f.name for f in self.plan.layout.fields if f.constant]
        return all(
            other.row_ends == self.row_ends
            and all(torch.equal(getattr(other, n)[:1], getattr(self, n)[:1]) for n in constant)
            for other in others
        )

    def cropped(self, tokens: int, total: int) -> tuple[State, int, Rows | None]:
        """A copy of the state without the tokens from position ``total`` on, of which ``tokens``
        are left, what then is `written`, and how rows begin.

        A group that is cut through at its end is decoded into the exact window.
        """
        plan = self.plan
        packed, left, group = self.row_ends[-2:][0], total, plan.codec.token_group
        sinks = 0 if plan.codec.identity else min(plan.sinks, total)
        if not plan.codec.identity:
            left = min(packed, sinks + (total - sinks) // group * group)
        old = self._line.rows
        if old is not None:
            changed = left if left < packed else total
            old = replace(old, exact=range(min(old.exact.start, changed), old.exact.stop))
        found, rows = copied(self, self.written, old, None, left - sinks)
        state = State(found, plan)
        ends = state.segment_ends
        if not plan.codec.identity:
            if left < min(packed, total):
                cut_through = read_packed(self.named, left, left + group, self.dtype)
                write_ring(state.window, left, cut_through[:, :, : total - left])
            ends.clamp_(max=left)
            if plan.retained:
                state.positions.masked_fill_(state.positions >= left, -1)
        ends[:, -1] = total
        return state, total, rows

    def snapshot(self, new: int) -> dict[str, Tensor]:
        """Copies of the fields in which a step of ``new`` tokens may overwrite earlier ones."""
        names = self.plan.layout.overwritten["step" if new <= MAX_STEP else "prefill"]
        return {name: getattr(self, name).clone() for name in names} if names else {}

    def undo(self, before: dict[str, Tensor]) -> None:
        """Undoes a failed step on this handle, from the `snapshot` ``before`` it."""
        for name, old in before.items():
            getattr(self, name).copy_(old)
        if "window" in before and (rows := self._line.rows) is not None:
            self._line.rows = replace(rows, exact=range(sys.maxsize))
        if "segment_ends" not in before:
            self.segment_ends.clamp_(max=self.written)

    def _reserve_window(self, new: int) -> None:
        """Makes room in `window` for a step of ``new`` tokens if a ratio of the tokens stays exact;
        gives back what a pivotal ratio no longer needs."""
        plan, slots = self.plan, self.window.shape[2]
        if plan.retention.fraction:
            after = self.written + new - plan.sinks
            # What a pivotal ratio needs beyond that is spare here.
            if plan.ring_slots(after) - MAX_STEP > slots:
                self.grow("window", plan.ring_slots(after + after // 4))
        elif plan.retention.pivotal and (new > MAX_STEP or slots > plan.ring):
            *_, packed, total = self.row_ends
            exact = total - packed + new
            wanted = max(plan.ring_slots(exact), exact)
            if wanted > slots or 2 * wanted <= slots or wanted == plan.ring:
                self.grow("window", wanted)

    def reserve_cos_sin(self, new: int, after: int) -> None:
        """Makes room in `cos_sin` for ``new`` more tokens, as `reserve`."""
        plan, room = self.plan, self.cos_sin.shape[1]
        needed = plan.capacity(self.written + new if plan.window_size is None else after)
        if needed > room:
            self.grow("cos_sin", max(needed, plan.capacity(room + room // 4)))
        if (branch := branch_of(self.cos_sin)) is not None:
            branch.keep(self.written + new)

    def held_cos_sin(self) -> Tensor:
        """The cosines and sines of the tokens that steps may still see, in order."""
        end, window_size = self.written, self.plan.window_size
        start = 0 if window_size is None else max(0, end - window_size)
        return read_ring(self.cos_sin, start, end, dim=1)

    def mark_dynamic(self) -> None:
        """Tells Dynamo that the length varies, so that one decode graph serves all of them. That of
        a static cache does not."""
        if self.plan.room is None:
            mark_dynamic(self, 2)
