"""Launches of generated kernels: now, traced by Inductor, or recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import KernelError
from lowering.support import interpreted
from triton_templates import Layout

# Arguments of a launch that are options of the compiler, not of the kernel.
_OPTIONS = ("num_warps", "num_stages")
# Triton compiles a kernel anew for numbers that this divides.
ALIGNMENT = 16


@dataclass(frozen=True)
class Launch:
    """A recorded launch.

    Attributes:
        kernel: Triton's function.
        arguments: the kernel's arguments by name.
        options: the compiler's options.
        step_elements: elements of keys and values that one round of the main loop reads; 0 where
            that is not counted.
        grid: programs on each axis.
        layouts: of the keys and of the values that the main loop reads, where that is counted.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    step_elements: int = 0
    grid: tuple[int | torch.SymInt, ...] = ()
    layouts: tuple[Layout, Layout] | None = None

    def is_constant(self, name: str) -> bool:
        """Whether this argument is a ``tl.constexpr``."""
        return "constexpr" in str(self.kernel.fn.__annotations__.get(name, ""))

    @property
    def specialization(self) -> tuple[Any, ...]:
        """What decides how the kernel is compiled when it is launched from Python."""
        seen = (
            value if self.is_constant(name) else _specialized_on(value)
            for name, value in self.arguments.items()
        )
        return (self.kernel, *seen, *self.options.items())

    def compile(self) -> None:
        """Compiles the kernel for the current device, without launching it."""
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)

    def run(self) -> None:
        """Launches it now, on the tensors that were recorded."""
        self.kernel[self.grid](**self.arguments, **self.options)


def _specialized_on(value: Any) -> Any:
    """What the compiler knows of an argument that is no constant."""
    if isinstance(value, Tensor):
        return value.dtype
    return (value == 1, value % ALIGNMENT == 0) if isinstance(value, int) else type(value)


_recorded: ContextVar[list[Launch] | None] = ContextVar("kvpass_recorded_launches", default=None)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collects kernels instead of launching them; with fake tensors nothing is computed at all."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def compile_ahead(call: Callable[[], object]) -> int:
    """Compiles the Triton kernels that ``call`` would launch, several at a time, on the GPU where
    its tensors are. What it computes meanwhile is nothing.

    Returns:
        How many there are.

    Raises:
        KernelError: if one does not compile.
    """
    with record_launches() as launches:
        call()
    # Triton's compiler leaves Python to other threads; those that share a kernel and its constants
    # find it compiled.
    distinct = {launch.specialization: launch for launch in launches}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for launch, done in [(x, pool.submit(x.compile)) for x in distinct.values()]:
            if (error := done.exception()) is not None:
                name = launch.kernel.__name__
                raise KernelError(f"Kernel {name} does not compile: {error}.") from error
    return len(distinct)


def recording() -> bool:
    """Whether launches are collected, see `record_launches`."""
    return _recorded.get() is not None


def launch(
    kernel: Any,
    grid: Sequence[int | torch.SymInt],
    *args: Any,
    step_elements: int = 0,
    layouts: tuple[Layout, Layout] | None = None,
    **kwargs: Any,
) -> None:
    """Runs a generated kernel; where it is traced, Inductor sees the kernel and inlines it.

    ``step_elements`` and ``layouts`` are only recorded, see `Launch`.
    """
    if (recorded := _recorded.get()) is not None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        positional = dict(zip(kernel.arg_names, args, strict=False))
        arguments = positional | kwargs
        recorded.append(Launch(kernel, arguments, options, step_elements, tuple(grid), layouts))
        return
    callee = kernel if interpreted() else torch.library.wrap_triton(kernel)
    callee[tuple(grid)](*args, **kwargs)


def on_nvidia() -> bool:
    """Whether the kernels may use PTX."""
    return torch.version.hip is None and not interpreted()
