"""`Line`: what all handles on one storage have in common."""

from __future__ import annotations

from dataclasses import dataclass

from kvpass.tensor.branches import Branch
from kvpass.tensor.rows import Rows


@dataclass
class Line:
    """What all handles on one storage have in common.

    Attributes:
        steps: how many have extended it.
        branch: None unless it shares memory with copies.
        rows: how its rows begin; None unless they share memory.
    """

    steps: int = 0
    branch: Branch | None = None
    rows: Rows | None = None
