"""Handlers of ops on a packed cache tensor, and a count of the ops for which it has to decode."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvpass.errors import CacheStateError

log = logging.getLogger(__name__)

# By op, or by the method of `torch.Tensor`.
HANDLERS: dict[Any, Callable[..., Any]] = {}
# Ops that had to decode a cache tensor outside compiled code, and how often.
DECODES: Counter[str] = Counter()


def handles(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the native implementation of aten ``ops``; it may return NotImplemented to
    decode."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        HANDLERS.update(dict.fromkeys(ops, function))
        return function

    return decorate


def note_decode(op: str, handle: Tensor, callers: int = 1) -> None:
    """Counts a decode outside compiled code; the first one warns, of the code that is so many calls
    above the caller."""
    if not DECODES:
        warnings.warn(
            f"{op} decoded a packed cache tensor {tuple(handle.shape)} to {handle.dtype}. "
            "kvpass warns once; kvpass.explain counts them all.",
            stacklevel=2 + callers,
        )
    DECODES[op] += 1
    log.debug("%s decoded %s", op, handle)


def write_refused(op: str, handle: Tensor) -> CacheStateError:
    """The error for a write that would be lost: what an op sees is a decoded copy."""
    return CacheStateError(
        f"{op} would write into a packed cache tensor {tuple(handle.shape)}, which only a step of "
        "the model extends. Change a copy, x.decode(), or use a new cache."
    )
