"""`Batch`: the requests that take a step together, as the ops of pages take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.format.retention import MAX_STEP
from kvpass.ops.pages import PagedStep, Request
from kvpass.serving.allocator import Step


@dataclass(frozen=True)
class Batch:
    """The steps of some requests, whose new tokens lie one behind the other.

    Attributes:
        step: all of them; the single queries are those of steps of up to `MAX_STEP` tokens.
        long: the other requests.
        kept: of the tokens that are kept exact: page, slot and which token of the batch it is,
            int64 ``[n, 3]``.
    """

    step: PagedStep
    long: Sequence[Request]
    kept: Tensor

    @staticmethod
    def of(steps: Sequence[Step], device: torch.device) -> Batch:
        """From the steps in their order."""
        shape = (2, len(steps), max((len(step.blocks) for step in steps), default=0))
        tables, first = torch.zeros(shape, dtype=torch.int32), 0
        requests: list[tuple[int, int, int]] = []
        single: list[tuple[int, int]] = []
        kept: list[tuple[int, int, int]] = []
        long: list[int] = []
        for i, step in enumerate(steps):
            packed, exact = tables[:, i]
            packed[: len(step.blocks)] = torch.tensor(step.blocks, dtype=torch.int32)
            for number, page in step.exact.items():
                exact[number] = page
            requests.append((step.past, step.total, first))
            if step.total - step.past <= MAX_STEP:
                single += [(i, position) for position in range(step.past, step.total)]
            else:
                long.append(i)
            for page, slot, start, end in step.kept:
                kept += [(page, slot + t - start, first + t - step.past) for t in range(start, end)]
            first += step.total - step.past
        packed, exact = tables.to(device).unbind()
        of_long = [Request(*requests[i], packed[i], exact[i]) for i in long]
        of_requests = _rows(requests, 3, torch.int32, device)
        of_single = _rows(single, 2, torch.int32, device)
        made = PagedStep(of_requests, packed, exact, of_single)
        return Batch(made, of_long, _rows(kept, 3, torch.int64, device))

    def keep(self, exact: Tensor, new: Tensor) -> None:
        """Stores new tokens ``[1, H, N, D]`` that are kept, in ``exact`` pages
        ``[pages, H, page_size, D]``."""
        pages, slots, tokens = self.kept.unbind(1)
        exact[pages, :, slots] = new[0].transpose(0, 1)[tokens]


def _rows(
    rows: Sequence[tuple[int, ...]], width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(rows, dtype=dtype, device=device).view(len(rows), width)
