"""The names of dtypes, as files and sentences have them."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, e.g. ``float16``."""
    return str(dtype).removeprefix("torch.")
