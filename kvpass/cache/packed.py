"""`PackedKV`: the cache tensor. It stands for ``[B, H, T, D]`` and stores quantized segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import is_traced, make_wrapper, mark_dynamic, tree_leaves, tree_map_only
from kvpass.cache import mixed, native
from kvpass.cache.codec import Codec
from kvpass.cache.order import ChannelOrder
from kvpass.cache.residency import MAX_STEP, Residency
from kvpass.cache.rope import Rope
from kvpass.cache.tensor_plan import TensorPlan
from kvpass.errors import CacheFullError, StaleHandleError
from kvpass.ops import unpack as _unpack  # noqa: F401  (registers the op)
from kvpass.ops.append import read_window, row_ends
from kvpass.ops.pack import write_window

# What is known of a `PackedKV` beside its inner tensors; Dynamo guards on it.
Meta = tuple[TensorPlan, torch.dtype, ChannelOrder | None]


class PackedKV(Tensor):
    """A handle on the packed keys or values of one layer.

    Outside compiled code it behaves as the tensor it stands for. Batch indexing, cropping,
    cloning, moving, and concatenation stay packed; anything else decodes, with one warning. A
    compiled step extends the storage in place and returns a new handle; older handles then raise
    `StaleHandleError`.

    Attributes:
        plan: how the tokens are stored.
        codes, params, window, sinks, outliers, kept, places, ends: the state, see
            `kvpass.ops.pack.empty_state`; where the plan has levels, see
            `kvpass.ops.reorder_chunks`, with ``codes0``, ``params0``, ``places0`` and so on.
        rotary: cosines and sines of the tokens, see `kvpass.ops.rotary`; all layers hold the same
            tensor.
        written: where the last segment ends, as the host knows it; where the plan has levels, how
            many exact tokens a row may have.
        order: in which order ``codes`` and ``window`` hold the channels of each head, None if in
            the model's own. What goes in and comes out here is in the model's own; ops on ``state``
            know nothing of it.
    """

    plan: TensorPlan
    codes: Tensor
    params: Tensor
    window: Tensor
    sinks: Tensor
    outliers: Tensor
    kept: Tensor
    places: Tensor
    rotary: Tensor
    ends: Tensor
    written: int
    order: ChannelOrder | None
    # Shared by all handles on one storage: how many steps have extended it.
    _steps: list[int]
    _born: int

    @staticmethod
    def __new__(
        cls: type[PackedKV],
        state: Sequence[Tensor],
        plan: TensorPlan,
        tokens: int,
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
        written: int | None = None,
        order: ChannelOrder | None = None,
    ) -> PackedKV:
        """Wraps ``state``, which stands for ``tokens`` tokens of logical type ``dtype``; the last
        of its segments ends at ``written`` (``tokens`` by default), and its channels are in
        ``order``."""
        shaped = state[0] if plan.codec.identity else state[2]
        size = (shaped.shape[0], shaped.shape[1], tokens, shaped.shape[3])
        self: PackedKV = make_wrapper(cls, size, stride, dtype, shaped.device)
        self.plan = plan
        for name, tensor in zip(plan.state_names, state, strict=True):
            setattr(self, name, tensor)
        self._steps, self._born = [0], 0
        self.written = tokens if written is None else written
        self.order = order
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def of_prompt(
        state: Sequence[Tensor],
        plan: TensorPlan,
        tokens: int,
        dtype: torch.dtype,
        order: ChannelOrder | None = None,
        stored: TensorPlan | None = None,
    ) -> PackedKV:
        """Wraps what ``kvpass::pack`` has made of a first prompt of ``tokens`` tokens by the plan
        ``stored``, which is ``plan`` by default."""
        stored = plan if stored is None else stored
        written, logical = tokens - stored.skipped(tokens), stored.logical(tokens)
        packed = PackedKV(state, plan, logical, dtype, written=written, order=order)
        packed.mark_dynamic()
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], Meta]:
        return list(self.plan.state_names), (self.plan, self.dtype, self.order)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        meta: Meta,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> PackedKV:
        plan, dtype, order = meta
        state = [inner[name] for name in plan.state_names]
        return PackedKV(state, plan, outer_size[2], dtype, outer_stride, order=order)

    @property
    def state(self) -> list[Tensor]:
        """The inner tensors in the order in which ops take them."""
        return [getattr(self, name) for name in self.plan.state_names]

    @property
    def own(self) -> list[Tensor]:
        """The inner tensors but for the cosines and sines that all layers share."""
        return [getattr(self, name) for name in self.plan.own_names]

    @property
    def made(self) -> list[Tensor]:
        """Where the plan has levels: the inner tensors but for the places of tokens."""
        return [getattr(self, name) for name in self.plan.made_names]

    @property
    def appended(self) -> list[Tensor]:
        """The inner tensors that ``append`` extends."""
        return [getattr(self, name) for name in self.plan.extended_names]

    @property
    def capacity(self) -> int:
        """Tokens that the packed segment has room for; where the plan has levels, the exact one."""
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held: codes, scales, minima, exact tokens and ends, spare room included; `rotary`,
        too, though all layers hold the same."""
        return sum(t.numel() * t.element_size() for t in self.state)

    @property
    def bits_per_element(self) -> float:
        """Bits that store one element of the tokens now held: everything but spare room, and but
        for `rotary`, of which a model has one."""
        self.check()
        if self.plan.levels:
            return mixed.bits_per_element(self)
        ends = [int(e) for e in self.ends[0].tolist()]
        exact = 8 * self.dtype.itemsize
        tokens = ends[-1] if self.plan.room is not None else self.shape[2]
        if self.plan.codec.identity:
            bits = float(exact)
        else:
            sinks = ends[0] if self.plan.sinks else 0
            packed = max(0, tokens - sinks - (ends[-1] - ends[-2]))
            bits = self.plan.codec.bits_per_element(self.shape[3], self.shape[1]) * packed
            bits += exact * (tokens - packed)
            bits += self.plan.kept * (exact + 32 / self.shape[3])
            bits /= max(tokens, 1)
        constant = self.params.nbytes if self.plan.codec.offline else 0
        return bits + 8 * (self.ends.nbytes + constant) / max(self.numel(), 1)

    @property
    def stale(self) -> bool:
        """Whether a later step has extended the storage."""
        return self._steps[0] != self._born

    def check(self) -> None:
        """Raises:
        StaleHandleError: if a later step has extended the storage.
        """
        if self.stale:
            raise StaleHandleError(
                f"This cache tensor of {self.shape[2]} tokens is stale: a later step has extended "
                "its storage. Use the tensor that the cache holds now, or clone() before the step."
            )

    def reserve(self, new: int, after: int | None = None) -> None:
        """Makes room for a step of ``new`` tokens: capacity grows by a quarter at least.

        Args:
            new: tokens of the step.
            after: logical length after it; by default nothing slides out of it.

        Raises:
            CacheFullError: if a static cache has no room for them.
        """
        tokens, plan = self.shape[2], self.plan
        after = tokens + new if after is None else after
        if plan.room is not None:
            if self.written + new > plan.room:
                raise CacheFullError(
                    f"The static cache has room for {plan.room} tokens and holds {self.written}; "
                    f"{new} more do not fit. Make it with a larger max_cache_len."
                )
            return
        if plan.keep is not None:
            if plan.capacity(after) > self.capacity:
                self.grow(plan.capacity(after + after // 4))
            return
        if plan.levels:
            # A prompt's tokens get room where it is known which of them are exact.
            needed = self.written + (new if new <= MAX_STEP else 0)
        elif plan.codec.identity:
            needed = tokens + new
        else:
            self._reserve_window(new)
            counted = (tokens if new <= MAX_STEP else tokens + new) - plan.sinks
            residency = plan.residency
            needed = counted - (residency.window if residency.pivotal else residency.stay(counted))
        if needed > self.capacity:
            more = max(self.capacity // 4, 2 * plan.tile)
            self.grow(plan.capacity(max(needed, self.capacity + more)))

    def grow(self, capacity: int) -> None:
        """Moves the packed segment to buffers with room for ``capacity`` tokens."""
        before = self.capacity
        for name, dim in native.token_dims(self.plan).items():
            old = getattr(self, name)
            shape = list(old.shape)
            shape[dim] = shape[dim] * capacity // before
            grown = old.new_empty(shape)
            if self.plan.keep is None:
                grown.narrow(dim, 0, old.shape[dim]).copy_(old)
            else:
                self._move_ring(old, grown, dim, before)
            setattr(self, name, grown)
        self.mark_dynamic()

    def _reserve_window(self, new: int) -> None:
        """Makes room in `window` for a step of ``new`` tokens if a ratio of the tokens stays exact;
        gives back what a pivotal ratio no longer needs."""
        plan, slots = self.plan, self.window.shape[2]
        if plan.residency.fraction:
            after = self.written + new - plan.sinks
            # What a pivotal ratio needs beyond that is spare here.
            if plan.slots(after) - MAX_STEP > slots:
                self.grow_window(plan.slots(after + after // 4))
        elif plan.residency.pivotal and (new > MAX_STEP or slots > plan.ring):
            *_, packed, total = row_ends(self.ends)
            exact = total - packed + new
            wanted = max(plan.slots(exact), exact)
            if wanted > slots or 2 * wanted <= slots or wanted == plan.ring:
                self.grow_window(wanted)

    def grow_window(self, slots: int) -> None:
        """Moves the exact tokens to a window of so many slots, which may be fewer."""
        old = self.window
        first = max(0, self.written - min(slots, old.shape[2]))
        self.window = old.new_empty((*old.shape[:2], slots, old.shape[3]))
        write_window(self.window, first, read_window(old, first, self.written))
        self.mark_dynamic()

    def reserve_rotary(self, new: int, after: int) -> None:
        """Makes room in `rotary` for ``new`` more tokens, as `reserve`."""
        plan, room = self.plan, self.rotary.shape[1]
        needed = plan.capacity(self.written + new if plan.keep is None else after)
        if needed > room:
            self.grow_rotary(max(needed, plan.capacity(room + room // 4)))

    def grow_rotary(self, room: int) -> None:
        """Moves `rotary` to a tensor with room for ``room`` tokens."""
        old = self.rotary
        self.rotary = old.new_empty((old.shape[0], room, old.shape[2]))
        if self.plan.keep is None:
            self.rotary[:, : old.shape[1]] = old
        else:
            self._move_ring(old, self.rotary, 1, old.shape[1], row_ends(self.ends)[-1])
        self.mark_dynamic()

    def _move_ring(
        self, old: Tensor, grown: Tensor, dim: int, capacity: int, end: int | None = None
    ) -> None:
        """Copies the tokens that newer ones have not overwritten to their slots in ``grown``; there
        was room for ``capacity`` tokens, of which the last ended at ``end``."""
        unit = capacity // old.shape[dim]
        end = row_ends(self.ends)[0] if end is None else end
        first = max(0, end - capacity)
        rows = torch.arange(first // unit, end // unit, device=self.device)
        kept = old.index_select(dim, rows % old.shape[dim])
        grown.index_copy_(dim, rows % grown.shape[dim], kept)

    def extended(self, new: int, after: int | None = None) -> PackedKV:
        """The handle after a step has stored ``new`` more tokens in place, of logical length
        ``after`` (by default nothing slides out of it); this one becomes stale."""
        b, h, tokens, d = self.shape
        after = tokens + new if after is None else after
        handle: PackedKV = make_wrapper(PackedKV, (b, h, after, d), None, self.dtype, self.device)
        # State, plan, age and Dynamo's marks; this runs per layer and step, so attribute by
        # attribute would be visible.
        handle.__dict__.update(self.__dict__)
        handle.written += new
        self._steps[0] += 1
        handle._born = self._steps[0]
        return handle

    def mark_dynamic(self) -> None:
        """Tells Dynamo that length and capacity vary, so that one decode graph serves all of
        them. Those of a static cache do not."""
        if self.plan.room is not None:
            return
        mark_dynamic(self, 2)
        for name, dim in self.growing.items():
            mark_dynamic(getattr(self, name), dim)

    @property
    def growing(self) -> dict[str, int]:
        """The inner tensors that grow with the context, and the dimension along which they do."""
        plan = self.plan
        if plan.room is not None:
            return {}
        dims = native.token_dims(plan)
        if plan.grows:
            dims["window"] = 2
        if plan.rope is not None:
            dims["rotary"] = 1
        if plan.levels:
            dims |= {name: dim for name, (dim, _) in mixed.token_runs(plan).items()}
        return dims

    def decode(self) -> Tensor:
        """The plain tensor ``[B, H, T, D]`` that this one stands for."""
        if is_traced(self.ends):
            return self.ends.new_empty(self.shape, dtype=self.dtype)
        out = self.stored()
        return out if self.order is None or is_traced(out) else self.order.restore(out)

    def stored(self) -> Tensor:
        """`decode` with the channels in the order in which they are stored."""
        if is_traced(self.ends):
            return self.ends.new_empty(self.shape, dtype=self.dtype)
        self.check()
        tokens, plan = self.shape[2], str(self.plan)
        out: Tensor = torch.ops.kvpass.unpack.default(self.state, tokens, plan, self.dtype)
        return out

    def __getitem__(self, key: Any) -> Tensor:
        """Crops and batch selections stay packed."""
        result = native.getitem(self, key)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
        if is_traced(self.ends):
            return super().__getitem__(key)
        # A view of the decoded tensor, not of this one: torch cannot trace those everywhere.
        native.note_decode("__getitem__", self)
        return self.decode()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Raises:
        CacheStateError: outside compiled code.
        """
        if not is_traced(self.ends):
            raise native.write_refused("__setitem__", self)
        super().__setitem__(key, value)

    def repeat_interleave(  # type: ignore[override]
        self, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
    ) -> Tensor:
        """Natively for the batch dimension; torch would decompose it into views that must
        decode."""
        if dim == 0:
            rows = torch.arange(self.shape[0], device=self.device)
            return self.index_select(
                0, torch.repeat_interleave(rows, repeats, output_size=output_size)
            )
        return torch.repeat_interleave(self.decode(), repeats, dim, output_size=output_size)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        stale = ", stale" if self.stale else ""
        return f"PackedKV(shape={tuple(self.shape)}, dtype={self.dtype}, plan='{self.plan}'{stale})"

    # Between the graphs of a model with graph breaks, Dynamo would compile what runs here, too.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler: Callable[..., Any] | None = native.HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        handles = [x for x in tree_leaves((args, kwargs)) if isinstance(x, PackedKV)]
        if not any(is_traced(h.ends) for h in handles):
            native.check_writes(func, args, kwargs)
            # Through torch's wrapper.
            native.note_decode(str(func), handles[0], callers=2)
        plain_args, plain_kwargs = tree_map_only(PackedKV, PackedKV.decode, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


native.register(PackedKV)
# torch.load refuses classes that it does not know.
torch.serialization.add_safe_globals([PackedKV, TensorPlan, Residency, Codec, ChannelOrder, Rope])
