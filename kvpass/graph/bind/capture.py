"""Whether CUDA graphs may replay a compiled graph: only what is the same memory, and the same
numbers on the host, in most calls. Where a cache grows both change, and the graph is recorded anew,
when a buffer is full."""

from __future__ import annotations

from collections.abc import Sequence

from kvpass.graph.bind.binding import Binding, FreshOutput


def makes_cache(binding: Binding) -> bool:
    """The graph makes a cache tensor, or packs one when it has run."""
    fresh = any(isinstance(output, FreshOutput) for output in binding.outputs)
    return fresh or bool(binding.buffers) or any(s.argument is None for s in binding.statics)


def capture_obstacle(binding: Binding, waiting: Sequence[str]) -> str | None:
    """Why CUDA graphs may not replay a graph, or None.

    Args:
        binding: of its arguments and results.
        waiting: ops of the graph whose providers wait for the device.
    """
    if makes_cache(binding):
        return "it makes the cache, which a replay would overwrite"
    if binding.growing is not None:
        return binding.growing
    if waiting:
        return f"kvpass::{waiting[0]} runs in plain PyTorch, which waits for the device"
    return None
