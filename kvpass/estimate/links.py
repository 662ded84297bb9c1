"""What devices that share a sequence send each other in a decode step, and how long that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvpass.errors import OptionError, check, is_number, unknown
from kvpass.estimate.shapes import ModelShape
from kvpass.format.shard import Shard
from kvpass.ops.attention_partial import partial_shape


@dataclass(frozen=True)
class Link:
    """What connects devices, as a ring.

    Attributes:
        bandwidth: of one device in one direction, bytes per second.
        start: what a collective takes before anything is sent, in seconds.
        hop: what each of its steps takes beside sending, in seconds.
        source: where the numbers come from.

    Raises:
        OptionError: if one is not allowed.
    """

    name: str
    bandwidth: float
    start: float
    hop: float = 0.0
    source: str = "given by hand"

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", 1), ("start", 0), ("hop", 0)):
            value = getattr(self, name)
            fits = is_number(value) and value >= least
            check(f"link {name}", value, fits, f"a number of at least {least}")

    def seconds(self, nbytes: float, devices: int) -> float:
        """How long it takes until each of ``devices`` has the ``nbytes`` of all others."""
        return self.start + (devices - 1) * (self.hop + nbytes / self.bandwidth)


def _stated(name: str, gigabytes: float, hop: float, source: str) -> Link:
    # NCCL's own model of a ring with its protocol for small messages, LL: src/graph/tuning.cc.
    return Link(name, gigabytes * 1e9, 6.6e-6, hop * 1e-6, f"{source}; latencies: NCCL's model")


LINKS = {
    link.name: link
    for link in (
        _stated("nvlink3", 300, 0.6, "NVIDIA A100 datasheet, half of 600 GB/s"),
        _stated("nvlink4", 450, 0.6, "NVIDIA H100 datasheet, half of 900 GB/s"),
        _stated("pcie4", 32, 1.0, "NVIDIA A100 datasheet, half of 64 GB/s"),
        _stated("pcie5", 64, 1.0, "NVIDIA H100 datasheet, half of 128 GB/s"),
        _stated("infiniband-ndr", 50, 2.7, "NVIDIA ConnectX-7 datasheet, 400 Gb/s"),
    )
}


def known_link(name: str) -> Link:
    """The link of that name.

    Raises:
        OptionError: if there is none.
    """
    if name not in LINKS:
        raise OptionError(unknown("link", name, LINKS))
    return LINKS[name]


def gathered(
    shape: ModelShape, batch: int, tokens: int, dtype: torch.dtype, shard: Shard
) -> list[int]:
    """The bytes that a device gives to each all-gather of a decode step, as
    `kvpass.graph.bind.shard` makes them: of each layer that is spread the output of its attention,
    and of latents, which are read decoded, all tokens of the device in ``dtype``. A layer that
    reads another one's keys and values is not counted."""
    found, checked = [], False
    for layer in shape.layers.values():
        if layer.window is not None:
            # Every device holds all of it.
            continue
        if layer.latents:
            share = batch * layer.heads * shard.share(tokens) * dtype.itemsize
            found += [share * dim for dim in (layer.key_dim, layer.value_dim)]
            continue
        size = partial_shape((batch, shape.query_heads, 1, layer.key_dim), layer.value_dim)
        # With the first one travels a number for each query, see `kvpass.ops.shard.with_sums`.
        further = 0 if checked else math.prod(size[:3])
        found.append((math.prod(size) + further) * torch.float32.itemsize)
        checked = True
    return found
