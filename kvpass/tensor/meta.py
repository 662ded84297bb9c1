"""`Meta`: what compiled code relies on of a cache tensor, as one object for all that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch

from kvpass.format.channels import ChannelBasis
from kvpass.format.tensor_plan import TensorPlan


@dataclass(frozen=True)
class Inner:
    """An inner tensor, which is contiguous.

    Attributes:
        shape: None stands for a size that grows, ``batch`` for the number of sequences.
    """

    shape: tuple[int | str | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Meta:
    """What is known of a `PackedKV` beside its sizes and its device; Dynamo guards on it.

    Make one with `meta_of`: a guard, at each step and for each tensor, then compares one object
    with itself.

    Attributes:
        plan, dtype, basis: of the `PackedKV`.
        inner: its inner tensors.
    """

    plan: TensorPlan
    dtype: torch.dtype
    basis: ChannelBasis | None
    inner: tuple[Inner, ...]

    def __deepcopy__(self, memo: Any) -> Self:
        # Dynamo's guard keeps a copy. Nothing here changes.
        return self


meta_of = cache(Meta)
