"""`StoredTensor`: the keys or the values of a layer, in packed and in exact pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.ops.ring import write_ring
from kvpass.serving.allocator import Step
from kvpass.serving.exact import ExactPages
from kvpass.serving.pages import TensorPages


class Exact(NamedTuple):
    """The exact tokens of a request before a step: sinks ``[1, H, s, D]``, if others are packed
    behind them, and the last ones ``[1, H, n, D]``, the first of which is at position ``start``."""

    sinks: Tensor
    tail: Tensor
    start: int


@dataclass(frozen=True)
class Readable:
    """The keys or the values of a request in a step.

    Attributes:
        pages: how they are stored.
        blocks: the blocks of the request.
        sinks: the first exact tokens ``[1, H, s, D]``.
        tail: exact tokens ``[1, H, n, D]`` from position ``start`` on, also those that are packed
            in this step.
        end: the position up to which tokens are packed in it.
    """

    pages: TensorPages
    blocks: Tensor
    sinks: Tensor
    tail: Tensor
    start: int
    end: int

    @property
    def packs(self) -> bool:
        """Whether tokens are stored otherwise than they are."""
        return not self.pages.plan.codec.identity

    @cached_property
    def packed(self) -> Tensor:
        """Tokens up to ``end``, decoded, sinks as they are: ``[1, H, end, D]``."""
        found = self.pages.read(self.blocks, self.end, self.tail.dtype)
        found[:, :, : self.sinks.shape[2]] = self.sinks[:, :, : self.end]
        return found

    def packed_before(self, tokens: int) -> int:
        """See `RetentionPolicy.packed_before`."""
        return self.pages.plan.retention.packed_before(tokens)

    def upto(self, packed: int, end: int) -> Tensor:
        """Tokens up to position ``end``, the first ``packed`` of them packed."""
        tail = self.tail[:, :, packed - self.start : end - self.start]
        return torch.cat([self.packed[:, :, :packed], tail], dim=2)

    def state(self) -> list[Tensor]:
        """All tokens after the step as ops take them, see `kvpass.format.state.State`."""
        plan, page = self.pages.plan, self.pages.page_size
        # Where packed tokens end: behind the sinks, if none is packed.
        total = self.start + self.tail.shape[2]
        sinks, packed = min(plan.sinks, total), max(self.end, min(plan.sinks, total))
        room = plan.capacity(packed - sinks)
        missing = max(0, -(-(room + plan.sinks) // page) - len(self.blocks))
        # Beyond what is packed any page does.
        blocks = torch.cat([self.blocks, self.blocks[:1].expand(missing)])
        fields = plan.layout.encoded()
        parts = self.pages.gathered(blocks, plan.sinks, room)
        found = {field.name: part for field, part in zip(fields, parts, strict=True)}
        basis = self.pages.basis
        tail, first = (x if basis is None else basis.store(x) for x in (self.tail, self.sinks))
        window = tail.new_empty((*tail.shape[:2], plan.ring, tail.shape[3]))
        write_ring(window, packed, tail[:, :, packed - self.start :])
        found["window"] = window
        if plan.sinks:
            found["sinks"] = tail.new_empty((*tail.shape[:2], plan.sinks, tail.shape[3]))
            found["sinks"][:, :, :sinks] = first
        ends = [*([sinks] if plan.sinks else []), packed, total]
        found["segment_ends"] = torch.tensor([ends], dtype=torch.int32, device=tail.device)
        return [found[name] for name in plan.layout.own_names]


@dataclass(frozen=True)
class StoredTensor:
    """The keys (``kind`` 0) or the values (1) of a layer, of all requests."""

    pages: TensorPages
    exact: ExactPages
    layer: int
    kind: int

    def before(self, step: Step) -> Exact:
        """The exact tokens before a step."""
        start, page = self.pages.plan.retention.packed_before(step.past - 1), self.pages.page_size
        found = self.exact.read(self.layer, self.kind, step.exact)
        # The pages of sinks come first.
        begin = found.shape[2] - math.ceil(step.past / page) * page
        tail = found[:, :, begin + start : begin + step.past]
        return Exact(found[:, :, : self.pages.plan.sinks if start else 0], tail, start)

    def append(self, step: Step, old: Exact, new: Tensor) -> Readable:
        """Stores ``new`` ``[1, H, n, D]``: packs what is due, and keeps the others exact."""
        start, pages = old.start, self.pages
        end = pages.plan.retention.packed_before(step.total - 1)
        tail = torch.cat([old.tail, new], dim=2)
        first = max(start, pages.plan.sinks)
        if end > first:
            pages.write(step.blocks, first, tail[:, :, first - start : end - start])
        for page, slot, begin, stop in step.kept:
            x = new[:, :, begin - step.past : stop - step.past]
            self.exact.write(self.layer, self.kind, (page, slot), x)
        sinks = old.sinks if start else tail[:, :, : pages.plan.sinks]
        return Readable(pages, step.blocks, sinks, tail, start, end)
