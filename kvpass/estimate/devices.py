"""GPUs by name: memory, bandwidth and peak throughput, as their makers state them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvpass.errors import OptionError, check, is_number, shown, unknown

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A GPU, or whatever holds a model.

    Attributes:
        memory: bytes. Those of the table are the stated GB of 1e9 bytes; where a GPU has as many
            GiB, the difference is left for the context of the driver and for activations.
        bandwidth: of that memory, bytes per second.
        flops: dense bfloat16 operations per second that accumulate in float32; None: not known,
            and no bound.
        source: where the numbers come from.

    Raises:
        OptionError: if one is not positive.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float | None = None
    source: str = "given by hand"

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "flops"):
            value = getattr(self, name)
            fits = (is_number(value) and value > 0) or (name == "flops" and value is None)
            check(name, value, fits, "a positive number")


def _stated(name: str, gigabytes: int, per_second: int, teraflops: float, source: str) -> Device:
    return Device(name, gigabytes * 10**9, per_second * 1e9, teraflops * 1e12, source)


DEVICES = {
    device.name: device
    for device in (
        _stated("a100-40gb", 40, 1555, 312, "NVIDIA A100 datasheet, SXM"),
        _stated("a100-80gb", 80, 2039, 312, "NVIDIA A100 datasheet, SXM"),
        _stated("a100-80gb-pcie", 80, 1935, 312, "NVIDIA A100 datasheet, PCIe"),
        _stated("h100", 80, 3350, 989.4, "NVIDIA H100 datasheet, SXM, without sparsity"),
        _stated("h100-pcie", 80, 2000, 756, "NVIDIA H100 datasheet, PCIe, without sparsity"),
        _stated("h200", 141, 4800, 989.4, "NVIDIA H200 datasheet, SXM, without sparsity"),
        _stated("l4", 24, 300, 121, "NVIDIA L4 datasheet, without sparsity"),
        _stated("l40s", 48, 864, 362, "NVIDIA L40S datasheet, without sparsity"),
        _stated("mi300x", 192, 5300, 1307.4, "AMD Instinct MI300X datasheet"),
        _stated("rtx-3090", 24, 936, 71, "NVIDIA Ampere GA102 whitepaper"),
        _stated("rtx-4090", 24, 1008, 165.2, "NVIDIA Ada whitepaper"),
    )
}


def known_device(name: str) -> Device:
    """The device of that name.

    Raises:
        OptionError: if there is none.
    """
    if name not in DEVICES:
        raise OptionError(unknown("device", name, DEVICES))
    return DEVICES[name]


def parse_bytes(text: str) -> int:
    """``16GiB``, ``80G`` or ``500000`` as bytes.

    Raises:
        OptionError: if it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"Size {shown(text)} cannot be read; allowed: e.g. 16GiB, 80G, 500000.")
    return int(float(match[1]) * _UNITS[match[2]])
