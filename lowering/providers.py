"""Who can compute each ``kvpass::`` op: ordered lists of providers.

Providers are ops of their own with the signature of the op that they stand for:
``kvpass_triton::<op>``, made with `torch.library.triton_op`, so that Inductor inlines their
kernels, and ``kvpass_cpp::<op>``, called as they are.
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
import kvpass.ops.reorder_chunks
import kvpass.ops.rotary
import kvpass.ops.unpack
import lowering.cpp.append
import lowering.cpp.attention
import lowering.cpp.pack
import lowering.cpp.reorder_chunks
import lowering.cpp.unpack
from lowering import append, attention, pack, unpack

_NAMESPACE = "kvpass_triton"
_CPP = torch.library.Library("kvpass_cpp", "DEF")


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: ``cpp``, ``triton`` or ``aten``.
        op: of the ``kvpass`` namespace.
        target: what to call, with the op's arguments.
        supports: given the op's arguments (tensors may be fake), None, or why it declines them.
        waits: for the device, to read lengths on the host.
    """

    name: str
    op: str
    target: Callable[..., Any]
    supports: Callable[..., str | None]
    waits: bool = False


def _supports_all(*args: Any) -> str | None:
    return None


# Whose references read the ends of segments on the host.
_READ_ENDS = ("append", "attention", "extend_chunks", "unpack")


def _aten(op: str) -> Provider:
    """The op itself: its kernel is the reference."""
    target = getattr(torch.ops.kvpass, op).default
    return Provider("aten", op, target, _supports_all, waits=op in _READ_ENDS)


def _triton(
    op: str,
    implementation: Callable[..., Any],
    supports: Callable[..., str | None],
    mutates: tuple[str, ...] = (),
) -> Provider:
    torch.library.triton_op(f"{_NAMESPACE}::{op}", implementation, mutates_args=mutates)
    target = getattr(getattr(torch.ops, _NAMESPACE), op).default
    return Provider("triton", op, target, supports)


def _cpp(op: str) -> Provider:
    """Module ``op`` of `lowering.cpp`, with the schema and the fake of the op it stands for."""
    meaning, module = getattr(kvpass.ops, op), getattr(lowering.cpp, op)
    _CPP.define(meaning.SCHEMA)
    _CPP.impl(op, getattr(module, op), "CPU")
    torch.library.register_fake(f"kvpass_cpp::{op}", getattr(meaning, f"{op}_fake"), lib=_CPP)
    return Provider("cpp", op, getattr(torch.ops.kvpass_cpp, op).default, module.supports)


# Best first; the last one of each op supports everything.
PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "attention": (
        _cpp("attention"),
        _triton("attention", attention.attention, attention.supports),
        _aten("attention"),
    ),
    "append": (
        _cpp("append"),
        _triton("append", append.append, append.supports, ("state",)),
        _aten("append"),
    ),
    "pack": (_cpp("pack"), _triton("pack", pack.pack, pack.supports), _aten("pack")),
    "unpack": (
        _cpp("unpack"),
        _triton("unpack", unpack.unpack, unpack.supports),
        _aten("unpack"),
    ),
    "reorder_chunks": (_cpp("reorder_chunks"), _aten("reorder_chunks")),
    "extend_chunks": (_aten("extend_chunks"),),
    "keep_rows": (_aten("keep_rows"),),
    "pack_rotary": (_aten("pack_rotary"),),
    "append_rotary": (_aten("append_rotary"),),
}
