"""``kvpass::attention`` in C++: a block of tokens at a time, straight from packed words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpass.ops.attention import AttentionArguments
from lowering.cpp.attend import attend, decline


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention``, or None."""
    return decline(AttentionArguments(*args, **kwargs))


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that are supported.

    A row that sees no token gives zero. Threads are torch's.
    """
    return attend(AttentionArguments(*args, **kwargs))
