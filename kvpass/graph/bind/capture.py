"""Whether CUDA graphs may replay a compiled graph: only what is the same memory, and the same
numbers on the host, in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpass.graph.bind.binding import Binding, FreshOutput


def makes_cache(binding: Binding) -> bool:
    """The graph makes a cache tensor, or packs one when it has run."""
    fresh = any(isinstance(output, FreshOutput) for output in binding.outputs)
    return fresh or bool(binding.buffers) or any(s.argument is None for s in binding.statics)


def capture_obstacle(
    binding: Binding, examples: Sequence[Any], waiting: Sequence[str]
) -> str | None:
    """Why CUDA graphs may not replay a graph, or None.

    Args:
        binding: of its arguments and results.
        examples: what Dynamo passed the backend.
        waiting: ops of the graph whose providers wait for the device.
    """
    if makes_cache(binding):
        return "it makes the cache, which a replay would overwrite"
    if any(examples[p].plan.room is None for p in binding.packed):
        return (
            "its cache grows, so that it moves and its length is a number of the host; use a "
            "static cache (cache_implementation='static')"
        )
    if waiting:
        return f"kvpass::{waiting[0]} runs in plain PyTorch, which waits for the device"
    return None
