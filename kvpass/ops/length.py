"""``kvpass::length``: how many tokens a cache tensor holds, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.ops.library import define


def length(ends: Tensor, side_by_side: bool = False) -> Tensor:
    """Reference of ``kvpass::length``. An op of its own, since Inductor computes what it can anew
    for every reader: those that come after the step's append would see the new length.

    Args:
        ends: a state's segment ends, int32 ``[B, segments]``; all sequences are equally long.
        side_by_side: segments are counted each on its own, as those of chunks are.

    Returns:
        int32 without dimensions; 0 if there is no sequence.
    """
    counted = ends[:1] if side_by_side else ends[:1, -1]
    return counted.sum(dtype=torch.int32)


def length_fake(ends: Tensor, side_by_side: bool = False) -> Tensor:
    """Shape of `length`."""
    return ends.new_empty(())


define("length(Tensor ends, bool side_by_side=False) -> Tensor", length, length_fake)
