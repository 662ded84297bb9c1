"""`PackedKV`: the cache tensor. It stands for ``[B, H, T, D]`` and stores quantized segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from kvpass._torch import is_traced, make_wrapper, tree_leaves, tree_map_only, written_arguments
from kvpass.format.channels import ChannelBasis, ChannelOrder, ChannelRotation
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.rope import Rope
from kvpass.format.state import State
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.library import op_of
from kvpass.tensor.dispatch import HANDLERS, note_decode, write_refused
from kvpass.tensor.line import Line
from kvpass.tensor.meta import Meta
from kvpass.tensor.storage import PackedStorage


class PackedKV(PackedStorage):
    """A handle on the packed keys or values of one layer.

    Outside compiled code it behaves as the tensor it stands for. Batch indexing, cropping,
    cloning, moving, and concatenation stay packed; anything else decodes, with one warning. A
    compiled step extends the storage in place and returns a new handle; older handles then raise
    `StaleHandleError`.

    What goes in and comes out here has its channels in the model's own basis; ops on ``state`` know
    nothing of it.
    """

    def __new__(
        cls,
        state: Sequence[Tensor],
        plan: TensorPlan,
        tokens: int,
        dtype: torch.dtype,
        written: int | None = None,
        basis: ChannelBasis | None = None,
    ) -> Self:
        """Wraps ``state``, which stands for ``tokens`` tokens of logical type ``dtype``, whose
        channels are in ``basis``; its last segment ends at ``written`` (default: ``tokens``)."""
        shaped = State(state, plan).tokens
        size = (shaped.shape[0], shaped.shape[1], tokens, shaped.shape[3])
        self = make_wrapper(cls, size, None, shaped, dtype)
        self.plan = plan
        for name, tensor in zip(plan.layout.names, state, strict=True):
            setattr(self, name, tensor.contiguous())
        self._line, self._born = Line(), 0
        self.written = tokens if written is None else written
        self.basis = basis
        return cast(Self, self)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def of_prompt(
        cls,
        state: Sequence[Tensor],
        plan: TensorPlan,
        tokens: int,
        dtype: torch.dtype,
        basis: ChannelBasis | None = None,
        stored: TensorPlan | None = None,
    ) -> Self:
        """Wraps what ``kvpass::pack`` has made of a first prompt of ``tokens`` tokens by the plan
        ``stored``, which is ``plan`` by default."""
        stored = plan if stored is None else stored
        written, logical = tokens - stored.skipped(tokens), stored.logical(tokens)
        packed = cls(state, plan, logical, dtype, written=written, basis=basis)
        packed.mark_dynamic()
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], Meta]:
        """One inner tensor, by which compilers tell that they trace: what else they have to know of
        the others, and to guard, is in `Meta`. Code for the state gets it from the cache tensor."""
        return ["segment_ends"], self.meta

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        meta: Meta,
        outer_size: Sequence[int],
        outer_stride: Sequence[int] | None,
    ) -> Self:
        """A stand-in, which is traced: without a state."""
        ends = inner["segment_ends"]
        self = make_wrapper(cls, outer_size, outer_stride, ends, meta.dtype)
        self.plan, self.basis, self.segment_ends, self._meta = meta.plan, meta.basis, ends, meta
        self._line, self._born, self.written = Line(), 0, outer_size[2]
        return cast(Self, self)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held, spare room included, and all that it shares with other layers and with its
        branches: `held_bytes` of several counts that once. What its rows share counts once; beside
        it they hold whole pages of their own, and no spare room."""
        return sum(self.held.values())

    @property
    def bits_per_element(self) -> float:
        """Bits that store one element of the tokens now held: everything but spare room, and but
        for what all layers share."""
        self.check()
        plan, ends, exact = self.plan, self.row_ends, 8 * self.dtype.itemsize
        tokens = ends[-1] if plan.room is not None else self.shape[2]
        if plan.codec.identity:
            bits = float(exact)
        else:
            sinks = ends[0] if plan.sinks else 0
            packed = max(0, tokens - sinks - (ends[-1] - ends[-2]))
            bits = plan.codec.bits_per_element(self.shape[3], self.shape[1]) * packed
            bits += exact * (tokens - packed) + plan.retained * (exact + 32 / self.shape[3])
            bits /= max(tokens, 1)
        constant = self.qparams.nbytes if plan.codec.static_ranges else 0
        return bits + 8 * (self.segment_ends.nbytes + constant) / max(self.numel(), 1)

    def extended(self, new: int, after: int | None = None) -> Self:
        """The handle after a step has stored ``new`` more tokens in place, of logical length
        ``after`` (by default nothing slides out of it); this one becomes stale."""
        b, h, tokens, d = self.shape
        after = tokens + new if after is None else after
        handle: Self = make_wrapper(type(self), (b, h, after, d), None, self, self.dtype)
        # State, plan, age and Dynamo's marks; this runs per layer and step, so attribute by
        # attribute would be visible.
        handle.__dict__.update(self.__dict__)
        handle.written += new
        line = self._line
        line.steps += 1
        handle._born = line.steps
        return handle

    def decode(self) -> Tensor:
        """The plain tensor ``[B, H, T, D]`` that this one stands for."""
        out = self.stored()
        return out if self.basis is None or is_traced(out) else self.basis.restore(out)

    def stored(self) -> Tensor:
        """`decode` with the channels in the basis in which they are stored."""
        if is_traced(self.segment_ends):
            return self.segment_ends.new_empty(self.shape, dtype=self.dtype)
        self.check()
        unpack = op_of(self.plan, "unpack")
        out: Tensor = unpack(self.state, self.shape[2], str(self.plan), self.dtype)
        return out

    def __getitem__(self, key: Any) -> Tensor:
        """Crops and batch selections stay packed."""
        result = HANDLERS[Tensor.__getitem__](self, key)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
        if is_traced(self.segment_ends):
            return super().__getitem__(key)
        # A view of the decoded tensor, not of this one: torch cannot trace those everywhere.
        note_decode("__getitem__", self)
        return self.decode()[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A branch: it shares the packed tokens that it has in common with this one."""
        if is_traced(self.segment_ends):
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]
        return HANDLERS[Tensor.__deepcopy__](self, memo)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Refuses to write outside compiled code.

        Raises:
            CacheStateError: there.
        """
        if not is_traced(self.segment_ends):
            raise write_refused("__setitem__", self)
        super().__setitem__(key, value)

    def repeat_interleave(  # type: ignore[override]
        self, repeats: int | Tensor, dim: int | None = None, *, output_size: int | None = None
    ) -> Tensor:
        """Stays packed along the batch; torch would decompose it into views that must decode."""
        if dim == 0:
            rows = torch.arange(self.shape[0], device=self.device)
            return self.index_select(
                0, torch.repeat_interleave(rows, repeats, output_size=output_size)
            )
        return torch.repeat_interleave(self.decode(), repeats, dim, output_size=output_size)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        stale = ", stale" if self.stale else ""
        shape, name = tuple(self.shape), type(self).__name__
        return f"{name}(shape={shape}, dtype={self.dtype}, plan='{self.plan}'{stale})"

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
        handler: Callable[..., Any] | None = HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        handles = [x for x in tree_leaves((args, kwargs)) if isinstance(x, PackedKV)]
        if not any(is_traced(h.segment_ends) for h in handles):
            _check_writes(func, args, kwargs)
            # Through torch's wrapper.
            note_decode(str(func), handles[0], callers=2)
        plain_args, plain_kwargs = tree_map_only(PackedKV, PackedKV.decode, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _check_writes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuses an operator that has to decode a packed tensor which it writes to.

    Raises:
        CacheStateError: if ``func`` is one.
    """
    passed: dict[int | str, Any] = dict(enumerate(args)) | dict(kwargs)
    for key in written_arguments(func) or ():
        for target in tree_leaves(passed.get(key)):
            if isinstance(target, PackedKV):
                raise write_refused(str(func), target)


# torch.load refuses classes that it does not know.
torch.serialization.add_safe_globals(
    [PackedKV, Line, TensorPlan, RetentionPolicy, Codec, ChannelOrder, ChannelRotation, Rope]
)
