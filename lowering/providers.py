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

from kvpass._torch_cpp import DIRECT

# Importing these defines the ops that are provided for here.
from kvpass.ops import append_pages as _append_pages  # noqa: F401
from kvpass.ops import attention_pages as _attention_pages  # noqa: F401
from kvpass.ops import chunk_shard as _chunk_shard  # noqa: F401
from kvpass.ops import length as _length  # noqa: F401
from kvpass.ops import linear as _linear  # noqa: F401
from kvpass.ops import shard as _shard  # noqa: F401
from kvpass.ops.library import FAKES, SCHEMAS
from lowering.cpp import append as cpp_append
from lowering.cpp import append_attention as cpp_append_attention
from lowering.cpp import append_pages as cpp_append_pages
from lowering.cpp import attention as cpp_attention
from lowering.cpp import attention_pages as cpp_attention_pages
from lowering.cpp import chunks as cpp_chunks
from lowering.cpp import linear as cpp_linear
from lowering.cpp import pack as cpp_pack
from lowering.cpp import shard as cpp_shard
from lowering.cpp import unpack as cpp_unpack
from lowering.triton import append, append_attention, attention, chunks, pack, unpack
from lowering.triton import append_pages as triton_append_pages
from lowering.triton import attention_pages as triton_attention_pages

_NAMESPACE = "kvpass_triton"
_CPP = torch.library.Library("kvpass_cpp", "DEF")


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    Attributes:
        name: ``cpp``, ``triton`` or ``aten``.
        op: its name in the ``kvpass`` namespace.
        target: the function that takes the op's arguments.
        unsupported_reason: from the op's arguments (tensors may be fake) to why they are declined,
            or None.
        waits: it waits for the device, to read lengths on the host.
    """

    name: str
    op: str
    target: Callable[..., Any]
    unsupported_reason: Callable[..., str | None]
    waits: bool = False


# Their references read the ends of segments on the host.
_READ_ENDS = (
    "append", "append_attention", "append_attention_chunks", "append_chunks_shard", "append_pages",
    "append_shard", "attention", "attention_chunks", "attention_pages", "attention_partial",
    "extend_chunks", "extend_chunks_shard", "unpack", "unpack_shard",
)  # fmt: skip


def _aten(op: str) -> Provider:
    """The op itself: its kernel is the reference."""
    target = getattr(torch.ops.kvpass, op).default
    return Provider("aten", op, target, lambda *_, **__: None, waits=op in _READ_ENDS)


def _triton(
    op: str,
    implementation: Callable[..., Any],
    unsupported_reason: Callable[..., str | None],
    mutates: tuple[str, ...] = (),
) -> Provider:
    torch.library.triton_op(f"{_NAMESPACE}::{op}", implementation, mutates_args=mutates)
    target = getattr(getattr(torch.ops, _NAMESPACE), op).default
    return Provider("triton", op, target, unsupported_reason)


def _cpp(
    op: str, implementation: Callable[..., Any], unsupported_reason: Callable[..., str | None]
) -> Provider:
    """An op with the schema and the fake of the one that it stands for."""
    _CPP.define(SCHEMAS[op])
    _CPP.impl(op, implementation, "CPU")
    torch.library.register_fake(f"kvpass_cpp::{op}", FAKES[op], lib=_CPP)
    target = getattr(torch.ops.kvpass_cpp, op).default
    setattr(target, DIRECT, implementation)
    return Provider("cpp", op, target, unsupported_reason)


_GENERATED = (
    _cpp("attention", cpp_attention.attention, cpp_attention.unsupported_reason),
    _cpp("append", cpp_append.append, cpp_append.unsupported_reason),
    _cpp(
        "append_attention",
        cpp_append_attention.append_attention,
        cpp_append_attention.unsupported_reason,
    ),
    _cpp(
        "attention_pages",
        cpp_attention_pages.attention_pages,
        cpp_attention_pages.unsupported_reason,
    ),
    _cpp("append_pages", cpp_append_pages.append_pages, cpp_append_pages.unsupported_reason),
    _cpp("pack", cpp_pack.pack, cpp_pack.unsupported_reason),
    _cpp("unpack", cpp_unpack.unpack, cpp_unpack.unsupported_reason),
    _cpp("linear", cpp_linear.linear, cpp_linear.unsupported_reason),
    _cpp("linears", cpp_linear.linears, cpp_linear.unsupported_linears),
    _cpp("attention_partial", cpp_attention.attention_partial, cpp_attention.unsupported_partial),
    _cpp("append_shard", cpp_shard.append_shard, cpp_shard.unsupported_append),
    _cpp("pack_shard", cpp_shard.pack_shard, cpp_shard.unsupported_pack),
    _cpp(
        "attention_partial_chunks_shard",
        cpp_shard.attention_partial_chunks_shard,
        cpp_shard.unsupported_attention_chunks,
    ),
    _cpp("append_chunks_shard", cpp_shard.append_chunks_shard, cpp_shard.unsupported_append_chunks),
    _cpp("reorder_chunks_shard", cpp_shard.reorder_chunks_shard, cpp_shard.unsupported_reorder),
    _cpp("attention_chunks", cpp_chunks.attention_chunks, cpp_chunks.unsupported_attention),
    _cpp("append_chunks", cpp_chunks.append_chunks, cpp_chunks.unsupported_append),
    _cpp("reorder_chunks", cpp_chunks.reorder_chunks, cpp_chunks.unsupported_reorder),
    _triton("attention_chunks", chunks.attention_chunks, chunks.unsupported_attention),
    _triton("append_chunks", chunks.append_chunks, chunks.unsupported_append, ("state",)),
    _triton("reorder_chunks", chunks.reorder_chunks, chunks.unsupported_reorder),
    _triton("extend_chunks", chunks.extend_chunks, chunks.unsupported_extend, ("state",)),
    _triton("unpack_chunks", chunks.unpack_chunks, chunks.unsupported_unpack),
    _triton("attention", attention.attention, attention.unsupported_reason),
    _triton("attention_partial", attention.attention_partial, attention.unsupported_reason),
    _triton("append", append.append, append.unsupported_reason, ("state",)),
    _triton(
        "attention_pages",
        triton_attention_pages.attention_pages,
        triton_attention_pages.unsupported_reason,
        ("out",),
    ),
    _triton(
        "append_pages",
        triton_append_pages.append_pages,
        triton_append_pages.unsupported_reason,
        ("pages",),
    ),
    _triton(
        "append_attention",
        append_attention.append_attention,
        append_attention.unsupported_reason,
        ("keys", "values"),
    ),
    _triton(
        "append_attention_chunks",
        chunks.append_attention_chunks,
        chunks.unsupported_step,
        ("keys", "values"),
    ),
    _triton("pack", pack.pack, pack.unsupported_reason),
    _triton("unpack", unpack.unpack, unpack.unsupported_reason),
)


def direct_ops() -> tuple[Any, ...]:
    """The ops with a function that compiled code may call in their place."""
    return tuple(p.target for p in _GENERATED if p.name == "cpp")


# Best first; the last one of each op supports everything.
PROVIDERS = {op: (*(p for p in _GENERATED if p.op == op), _aten(op)) for op in SCHEMAS}
