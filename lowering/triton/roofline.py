"""How long a decode step of one layer should take on a GPU, predicted from what its kernels read
and how many instructions they need: for judging a change where no GPU is."""

from __future__ import annotations

from dataclasses import dataclass

from lowering.triton.inspection import bytes_per_element, rates
from triton_templates import Layout

# Between one kernel of a CUDA graph and the next that waits for it, and what the first and the last
# tile of attention take however many there are: the 10 us of 4,096 tokens, measured on an H200.
_LAUNCH = 2e-6
_LATENCY = 4e-6
# The share of cycles in which a scheduler with two warps issues an instruction:
# 0.42 at 4 bits and 0.47 at 2, measured on an H200.
_ISSUED = 0.45
_DENSE = Layout(128)


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step over packed tokens alone.

    Attributes:
        memory: reading them once, at 90% of the memory's bandwidth.
        issue: instructions of attention's main loop, at the rate at which schedulers issue them.
        launches: the kernels that follow each other, and the latency of attention.
        dense_memory: reading a cache of 16 bits.
    """

    memory: float
    issue: float
    launches: float
    dense_memory: float

    @property
    def total(self) -> float:
        """The step: what takes longer of memory and instructions, and the launches."""
        return max(self.memory, self.issue) + self.launches

    @property
    def dense(self) -> float:
        """As much of attention to a cache of 16 bits that waits for memory alone, in as many
        launches."""
        return self.dense_memory + self.launches


def predict(
    layouts: tuple[Layout, Layout],
    per_element: float,
    launches: int,
    capability: int,
    *,
    tokens: int,
    kv_heads: int,
) -> Prediction:
    """The prediction of a step.

    Args:
        layouts: of keys and of values.
        per_element: thread instructions per element of keys and values, see `KernelReport`.
        launches: kernels of a step.
        capability: compute capability of the GPU, whose rates are those of its largest model.
        tokens: of all sequences together.
        kv_heads: KV heads of the layer.
    """
    instructions, bandwidth = rates(capability)
    elements = tokens * kv_heads * sum(x.head_dim for x in layouts)
    return Prediction(
        elements * bytes_per_element(*layouts, kv_heads) / bandwidth,
        elements * per_element / instructions / _ISSUED,
        launches * _LAUNCH + _LATENCY,
        elements * bytes_per_element(_DENSE, _DENSE) / bandwidth,
    )
