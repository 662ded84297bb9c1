"""Recording what compiled code calls, through private PyTorch APIs: C++ functions by their
addresses, PyTorch's ops as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvpass._torch import storage_key, tree_leaves, tree_map_only
from kvpass.errors import KernelError

_empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
# Of ops that wait for other processes.
_COLLECTIVE = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
# What reads a tensor without calling an op.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
# The most numbers that a recorded function takes.
MOST_NUMBERS = 64
# Bytes of a step's intermediate results, none of which is freed: beyond, memory is dearer.
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class Call:
    """A call of a C++ function.

    Attributes:
        address: of the function.
        numbers: addresses and sizes, each of 8 bytes.
        refuses: a result that is not negative says that nothing was done.
    """

    address: int
    numbers: tuple[int, ...]
    refuses: bool = False


# A call of one of PyTorch's ops, whose results go where they went; it takes a step's arguments.
Again = Callable[[Sequence[Any]], None]


@dataclass(frozen=True)
class _Part:
    """A tensor in the memory of an argument, which would be kept alive by it.

    Attributes:
        position: of the argument.
        place: size and stride of a view of it, and its offset from the argument's; None for all.
    """

    position: int
    place: tuple[Sequence[int], Sequence[int], int] | None

    def of(self, args: Sequence[Any]) -> Tensor:
        """The same part of another step's argument."""
        whole: Tensor = args[self.position]
        if self.place is None:
            return whole
        size, stride, offset = self.place
        return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _fill(value: Any) -> Callable[[Sequence[Any]], Any] | None:
    """What puts a step's arguments into an op's, where that has parts of them."""
    if isinstance(value, _Part):
        return value.of
    if not isinstance(value, list | tuple):
        return None
    fills = [_fill(x) for x in value]
    if not any(fills):
        return None
    return lambda step: [
        x if fill is None else fill(step) for x, fill in zip(value, fills, strict=True)
    ]


@dataclass(eq=False)
class CompiledModule:
    """A module of Inductor's generated code.

    Attributes:
        scope: its global names.
        foreign: whether it has kernels that cannot be recorded.
        addresses: of the others.
    """

    scope: dict[str, Any]
    foreign: bool
    addresses: dict[str, int] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Notes all that compiled code calls in this thread, while it is active.

    Attributes:
        calls: in their order.
        held: what the calls read and write, which must not be freed, but for the arguments.
        problem: why they cannot be made again, if that is so.
        inside: one of PyTorch's ops is running, which is called again as a whole.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call | Again] = []
        self.held: list[Any] = []
        self.problem: str | None = None
        self.inside = False
        self._storages: set[int] = set()
        self._bytes = 0
        tensors = [(i, x) for i, x in enumerate(args) if isinstance(x, Tensor)]
        self._known = {storage_key(x): (i, x) for i, x in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        self.inside = True
        try:
            results = func(*args, **given)
        finally:
            self.inside = False
        if self.problem is not None:
            return results
        made = [x for x in tree_leaves(results) if x is not None]
        self.hold(made)
        data_dependent = torch.Tag.dynamic_output_shape in func.tags
        if func.namespace in _COLLECTIVE or data_dependent or not all(map(_is_tensor, made)):
            self.refuse(f"it calls {func.name()}")
        # A view's address stays.
        elif not func.is_view and self.problem is None:
            self._note_op(func, args, given, made)
        return results

    def refuse(self, reason: str) -> None:
        """Notes a reason, unless there is one; nothing is kept then."""
        self.problem = self.problem or reason
        self.held.clear()
        self.calls.clear()

    def is_known(self, x: Tensor) -> bool:
        """Whether a tensor lies in the memory of an argument."""
        return storage_key(x) in self._known

    def hold(self, values: Sequence[Any]) -> None:
        """Keeps tensors, but for the arguments and their parts, unless they take much memory."""
        for x in values:
            if not isinstance(x, Tensor) or self.is_known(x):
                continue
            self.held.append(x)
            if (key := storage_key(x)) not in self._storages:
                self._storages.add(key)
                self._bytes += x.untyped_storage().nbytes()
        if self._bytes > _MOST_BYTES:
            self.refuse(f"its results between take over {_MOST_BYTES} bytes")

    def _part(self, x: Tensor) -> Tensor | _Part:
        if not self.is_known(x):
            return x
        position, whole = self._known[storage_key(x)]
        if x.dtype != whole.dtype:
            self.refuse("it reads an argument as another dtype")
        offset = int(x.storage_offset() - whole.storage_offset())
        is_whole = (x.shape, x.stride(), offset) == (whole.shape, whole.stride(), 0)
        return _Part(position, None if is_whole else (x.shape, x.stride(), offset))

    def _note_op(self, func: OpOverload, args: Any, given: Any, made: Sequence[Tensor]) -> None:
        noted, named = tree_map_only(Tensor, self._part, (args, given))
        fills = [(i, fill) for i, x in enumerate(noted) if (fill := _fill(x)) is not None]
        options = [(name, fill) for name, x in named.items() if (fill := _fill(x)) is not None]
        inputs = {storage_key(x) for x in tree_leaves((args, given)) if _is_tensor(x)}
        places = [None if storage_key(x) in inputs else self._part(x) for x in made]
        returns = any(place is not None for place in places)

        def again(step: Sequence[Any]) -> None:
            called, given = list(noted), dict(named)
            for i, fill in fills:
                called[i] = fill(step)
            for name, fill in options:
                given[name] = fill(step)
            results = func(*called, **given)
            if not returns:
                return
            new = [x for x in tree_leaves(results) if x is not None]
            for place, x in zip(places, new, strict=True):
                if place is None:
                    continue
                kept = place.of(step) if isinstance(place, _Part) else place
                if kept.shape != x.shape:
                    raise KernelError(f"{func.name()} of a replayed step has another size.")
                kept.copy_(x)

        self.calls.append(again)

    def note_packed(self, function: Any, packed: bytes) -> None:
        """A call of a function that takes a packed struct."""
        struct = ctypes.create_string_buffer(packed, len(packed))
        self.held.append(struct)
        address = ctypes.cast(function, ctypes.c_void_p).value or 0
        refuses = function.restype is not None
        self.calls.append(Call(address, (ctypes.addressof(struct),), refuses))

    def note_kernel(self, address: int, args: Sequence[Any]) -> None:
        """A call of one of Inductor's kernels."""
        self.hold(args)
        if not all(isinstance(x, Tensor) or type(x) is int for x in args):
            self.refuse("a kernel takes other numbers than integers")
            return
        if len(args) > MOST_NUMBERS:
            self.refuse(f"a kernel takes more than {MOST_NUMBERS} arguments")
        numbers = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in args)
        self.calls.append(Call(address, numbers))


class _HostReads(TorchFunctionMode):
    """Notes that numbers of a tensor are read past the dispatcher: those of another step differ."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READING and not self._recorder.inside:
            self._recorder.refuse("it reads a tensor on the host")
        return func(*args, **(kwargs or {}))


# Of each thread that records.
_recorders: dict[int, Recorder] = {}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _recorder() -> Recorder | None:
    found = _recorders.get(get_ident()) if _recorders else None
    return None if found is None or found.inside or found.problem is not None else found


def call_packed(function: Any, packed: bytes) -> Any:
    """Calls a function that takes a packed struct."""
    if recorder := _recorder():
        recorder.note_packed(function, packed)
    return function(packed)


def empty_strided_cpu(*args: Any) -> Tensor:
    """An unwritten tensor, as Inductor's code makes its own."""
    made: Tensor = _empty_strided_cpu(*args)
    if recorder := _recorder():
        recorder.hold([made])
    return made


@contextmanager
def recording(modules: Sequence[CompiledModule], args: Sequence[Any]) -> Iterator[Recorder]:
    """Records what this thread calls in these modules, in a step with these arguments."""
    recorder, saved = Recorder(args), [dict(module.scope) for module in modules]
    for module in modules:
        if module.foreign:
            recorder.refuse("it has kernels of a kind that is not recorded")
        if "empty_strided_cpu" in module.scope:
            module.scope["empty_strided_cpu"] = empty_strided_cpu
        for name, address in module.addresses.items():
            module.scope[name] = _noting(module.scope[name], address)
    _recorders[get_ident()] = recorder
    try:
        with recorder, _HostReads(recorder):
            yield recorder
    finally:
        del _recorders[get_ident()]
        for module, scope in zip(modules, saved, strict=True):
            module.scope.update(scope)


def _noting(kernel: Callable[..., None], address: int) -> Callable[..., None]:
    def noted(*args: Any) -> None:
        if recorder := _recorder():
            recorder.note_kernel(address, args)
        kernel(*args)

    return noted
