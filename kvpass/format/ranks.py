"""`Ranks`: the processes that share the heads of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    """The processes of tensor parallelism, each of which has as many heads, and packs those.

    Attributes:
        own: the place of this one among them.
        every: their ranks in ``torch.distributed``, in the order of the heads.
    """

    own: int
    every: tuple[int, ...]

    def part(self, numbers: Any) -> Any:
        """What is this one's of ``numbers`` of all heads, head by head: bytes or a tuple."""
        size = len(numbers) // len(self.every)
        return numbers[self.own * size : (self.own + 1) * size]
