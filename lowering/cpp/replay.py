"""Recorded calls of compiled functions, made again by a loop in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch

from kvpass._torch_calls import MOST_NUMBERS, Again, Call
from kvpass.errors import KernelError
from lowering.cpp.library import load_function, native_lanes, source
from lowering.cpp.structs import REPLAY

_MESSAGE_BYTES = 1024


@cache
def _source() -> str:
    struct = REPLAY.declaration(MOST_NUMBERS=MOST_NUMBERS)
    return source(["replay.h"], ["replay"], [struct], lanes=native_lanes(), dtype=torch.float32)


def repeat(calls: Sequence[Call | Again]) -> list[Again]:
    """What makes recorded calls again, one after the other: those of C++ functions by a `Loop`."""
    parts: list[Again] = []
    for compiled, some in groupby(calls, lambda call: isinstance(call, Call)):
        if compiled:
            parts.append(Loop([call for call in some if isinstance(call, Call)]))
        else:
            parts += [call for call in some if not isinstance(call, Call)]
    return parts


class Loop:
    """Makes calls of C++ functions again. What these read and write is held elsewhere."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._function = load_function("replay", _source())
        counts = [-1 if c.refuses else len(c.numbers) for c in calls]
        known = zip(calls, counts, strict=True)
        numbers = [n for c, count in known for n in (c.address, count, *c.numbers)]
        self._numbers = (ctypes.c_uint64 * len(numbers))(*(n % 2**64 for n in numbers))
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._count = len(calls)
        self._arguments = REPLAY.pack(
            ctypes.addressof(self._numbers), self._count,
            ctypes.addressof(self._message), _MESSAGE_BYTES,
        )  # fmt: skip

    def __call__(self, _args: Sequence[Any] = ()) -> None:
        """Makes the calls.

        Raises:
            KernelError: if one of them fails; those behind it are not made.
        """
        made = self._function(self._arguments)
        if made < self._count:
            reason = self._message.value.decode(errors="replace")
            self._message.value = b""
            reason = reason or "a cache tensor has no room; make it with PackedKV.reserve() first"
            raise KernelError(f"Call {made} of {self._count} of a replayed step failed: {reason}.")
