"""``kvpass::attention`` in C++: a block of tokens at a time, straight from packed words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowering.cpp.attend import attend, decline


def supports(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::attention``, or None."""
    return decline(q, keys, values, mask, k_plan, v_plan)


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    mask: Tensor | None,
    scale: float,
    k_plan: str,
    v_plan: str,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As `kvpass.ops.attention.attention`, for arguments that `supports` takes.

    Args and result are that function's. A row that sees no token gives zero. Threads are torch's.
    """
    arguments = (q, keys, values, mask, scale, k_plan, v_plan, sinks, causal, window, softcap)
    return attend(*arguments)
