"""What the layers of a transformers cache hold, as JSON and named tensors, and back.

Nothing is known here of kinds of layers: every attribute of a layer is a number, a text, a dtype, a
device, a tensor, a packed tensor, or a mapping of such (recurrent and convolution states).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import is_subclass, storage_key
from kvpass.errors import CacheFileError, shown
from kvpass.format.channels import channel_basis
from kvpass.format.chunked_plan import ChunkedPlan
from kvpass.format.dtypes import dtype_name
from kvpass.format.layout import Field
from kvpass.format.parse import parse_plan
from kvpass.format.sharded_plan import Sharded
from kvpass.ops.ring import ring_runs
from kvpass.tensor.branches import another
from kvpass.tensor.chunked import ChunkedKV
from kvpass.tensor.packed import PackedKV

# What JSON can write by itself.
_Plain = bool | int | float | str | None


class Writer:
    """Turns what layers hold into JSON.

    Attributes:
        tensors: those that the JSON names, each memory once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # By its memory: the name of the first tensor there, and that tensor.
        self._known: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
        # The memory of `tensors`.
        self._saved: set[int] = set()

    def value(self, value: Any, path: str) -> Any:
        """JSON for ``value``, which is called ``path``.

        Raises:
            CacheFileError: if it, or something in it, is of a kind that cannot be saved.
            StaleHandleError: if it is a cache tensor that a later step has extended.
        """
        if isinstance(value, _Plain):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, PackedKV):
            return {"packed": self._packed(value, path)}
        if isinstance(value, Tensor) and not is_subclass(value):
            return self._tensor(value, path, value)
        if isinstance(value, Mapping):
            return {"mapping": [[k, self.value(x, f"{path}.{k}")] for k, x in value.items()]}
        raise CacheFileError(
            f"The cache holds {shown(value)} as '{path}', which cannot be saved; allowed: tensors, "
            "numbers, texts, and mappings of them."
        )

    def _packed(self, x: PackedKV, path: str) -> dict[str, Any]:
        if isinstance(x.plan, Sharded):
            raise CacheFileError(
                f"'{path}' is spread over {x.plan.shard.size} processes, which cannot be saved; "
                "allowed: caches that one process holds."
            )
        x.check()
        state = {
            name: self._tensor(getattr(x, name), f"{path}.{name}", _used(x, field))
            for name, field in x.plan.layout.by_name.items()
        }
        # One tensor for equal bases: it is cached.
        basis = None if x.basis is None else self.value(x.basis.tensor(), f"{path}.basis")
        facts = {"plan": str(x.plan), "tokens": x.shape[2], "written": x.written}
        return {**facts, "dtype": dtype_name(x.dtype), "basis": basis, "state": state}

    def _tensor(self, tensor: Tensor, path: str, used: Tensor) -> dict[str, Any]:
        """The name of ``tensor``, of which ``used`` is saved, and its strides where they are not
        the usual ones: graphs are compiled for strides."""
        memory = (storage_key(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape)
        name, first = self._known.setdefault(memory, (path, tensor))
        kept, found = used.detach(), {}
        dense = 1 + sum((n - 1) * s for n, s in zip(kept.shape, kept.stride(), strict=True))
        strided = kept.stride() != torch.empty(kept.shape, device="meta").stride()
        if dense == kept.numel() and (strided or first is not tensor):
            found = {"shape": list(kept.shape), "stride": list(kept.stride())}
            # As it lies in memory.
            kept = kept.as_strided((dense,), (1,)) if strided else kept
        if name == path:
            kept = kept.cpu().contiguous()
            # Not what else is in its memory, nor what is saved already.
            whole = kept.untyped_storage().nbytes() == kept.nbytes
            alone = whole and storage_key(kept) not in self._saved
            self.tensors[name] = kept if alone else kept.clone()
            self._saved.add(storage_key(self.tensors[name]))
        # What is one tensor stays one, which graphs rely on.
        return {("tensor" if first is tensor else "another"): name, **found}


def _used(x: PackedKV, field: Field) -> Tensor:
    """The tensor of a field, without room that was made for later steps; rings are whole. Slots
    that hold no token are zero: what was in memory before is nobody's business."""
    tensor: Tensor = getattr(x, field.name)
    if isinstance(x, ChunkedKV):
        return _used_by_chunks(x, field, tensor)
    plan, ends = x.plan, x.row_ends
    packed = ends[-1 if plan.codec.identity else -2]
    first = 0
    if plan.window_size is not None:
        first = max(0, x.written - max(x.shape[2], plan.window_size))
    if field.name == "window":
        return _only(tensor, 2, max(first, packed), x.written)
    if field.name == "sinks":
        return _only(tensor, 2, 0, ends[0])
    end = {"capacity": packed - plan.sinks, "cos_sin": x.written}.get(field.grows or "")
    if end is None:
        return tensor
    room = field.room(tensor)
    room = room if plan.window_size is not None else min(plan.capacity(end), room)
    kept, group = field.tokens(tensor, 0, room), field.group
    return _only(kept, field.token_dim, first // group, -(-end // group))


def _only(ring: Tensor, dim: int, first: int, end: int) -> Tensor:
    """A copy of a ring with entries ``first ... end`` only, all others zero."""
    kept, slots = ring.clone(memory_format=torch.preserve_format), ring.shape[dim]
    for slot, _, count in ring_runs(end, max(0, slots - (end - first)), slots):
        kept.narrow(dim, slot, count).zero_()
    return kept


def _used_by_chunks(x: ChunkedKV, field: Field, tensor: Tensor) -> Tensor:
    """`_used` where each row has as many tokens in a segment as ``segment_ends`` says."""
    plan, kept = x.plan, tensor.clone(memory_format=torch.preserve_format)
    for segment in range(len(plan.codecs)):
        if field.name in plan.segment_fields(segment):
            for row, count in enumerate(x.segment_ends[:, segment].tolist()):
                held, entries = -(-count // field.group), kept.shape[field.token_dim]
                kept[row].narrow(field.token_dim - 1, held, entries - held).zero_()
    return kept


class Reader:
    """Turns what `Writer` has made back into what layers hold.

    Args:
        tensors: all that were saved.
        device: where layers say that they are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def value(self, saved: Any) -> Any:
        """The value of which this is the JSON."""
        if isinstance(saved, _Plain):
            return saved
        (kind, content), *strided = saved.items()
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return self._device
        if kind == "mapping":
            return {key: self.value(x) for key, x in content}
        if kind == "packed":
            return self._packed(content)
        if strided:
            return another(self._tensors[content], **dict(strided))
        return self._tensors[content] if kind == "tensor" else another(self._tensors[content])

    def _packed(self, saved: Mapping[str, Any]) -> PackedKV:
        plan, dtype = parse_plan(saved["plan"]), getattr(torch, saved["dtype"])
        state = [self.value(saved["state"][name]) for name in plan.layout.names]
        basis = None if saved["basis"] is None else channel_basis(self.value(saved["basis"]))
        kind = ChunkedKV if isinstance(plan, ChunkedPlan) else PackedKV
        written = saved["written"]
        packed = kind(state, plan, saved["tokens"], dtype, written=written, basis=basis)
        packed.mark_dynamic()
        return packed
