"""``kvpass::append_attention`` in C++ for new keys and queries in another basis: the kernels of
``append`` and ``attention`` rotate them where they read them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpass.ops.append_attention import StepArguments, own_tensors
from lowering.cpp import append as cpp_append
from lowering.cpp import attention as cpp_attention
from lowering.support import unsupported_basis


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why C++ declines these arguments of ``kvpass::append_attention``, or None."""
    step, a = StepArguments.split(*args, **kwargs)
    if step.basis is None:
        return "appends and attention are as fast one by one, where nothing is rotated"
    keys, values = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    return (
        unsupported_basis(step)
        or cpp_append.unsupported_reason(keys, step.new_keys, a.k_plan, clip=step.k_clip)
        or cpp_append.unsupported_reason(values, step.new_values, a.v_plan, clip=step.v_clip)
        or cpp_attention.unsupported_arguments(a)
    )


def append_attention(
    new_keys: Tensor,
    new_values: Tensor,
    _cos_sin: Tensor | None,
    _rope: str | None,
    _k_clip: Tensor | None,
    _v_clip: Tensor | None,
    basis: Tensor,
    *attention: Any,
    **options: Any,
) -> Tensor:
    """As `kvpass.ops.append_attention.append_attention`, for arguments that are supported.
    (Spelled out: this runs once per layer and step. The ``options`` are attention's last ones.)"""
    basis = basis.contiguous()
    _, keys, values, _, _, k_plan, v_plan, *_ = attention
    cpp_append.append(own_tensors(keys, k_plan), new_keys, k_plan, basis=basis)
    cpp_append.append(own_tensors(values, v_plan), new_values, v_plan)
    return cpp_attention.attention(*attention, **options, basis=basis)
