"""Who can compute each ``kvpass::`` op: ordered lists of providers.

Triton providers are ops of their own, ``kvpass_triton::<op>``, with the signature of the op that
they stand for, made with `torch.library.triton_op`, so that Inductor inlines their kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Importing these defines the ops that are provided for here.
import kvpass.ops.append
import kvpass.ops.attention
import kvpass.ops.pack
import kvpass.ops.unpack  # noqa: F401
from lowering import append, attention, pack

_NAMESPACE = "kvpass_triton"


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: ``triton`` or ``aten``.
        op: of the ``kvpass`` namespace.
        target: what to call, with the op's arguments.
        supports: given the op's arguments (tensors may be fake), None, or why it declines them.
    """

    name: str
    op: str
    target: Callable[..., Any]
    supports: Callable[..., str | None]


def _supports_all(*args: Any) -> str | None:
    return None


def _aten(op: str) -> Provider:
    """The op itself: its kernel is the reference."""
    return Provider("aten", op, getattr(torch.ops.kvpass, op).default, _supports_all)


def _triton(
    op: str,
    implementation: Callable[..., Any],
    supports: Callable[..., str | None],
    mutates: tuple[str, ...] = (),
) -> Provider:
    torch.library.triton_op(f"{_NAMESPACE}::{op}", implementation, mutates_args=mutates)
    target = getattr(getattr(torch.ops, _NAMESPACE), op).default
    return Provider("triton", op, target, supports)


# Best first; the last one of each op supports everything.
PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "attention": (
        _triton("attention", attention.attention, attention.supports),
        _aten("attention"),
    ),
    "append": (_triton("append", append.append, append.supports, ("state",)), _aten("append")),
    "pack": (_triton("pack", pack.pack, pack.supports), _aten("pack")),
    "unpack": (_aten("unpack"),),
}
