"""The machine: its names, its devices, their caches and memory, and refusals of what it lacks."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvpass.errors import OptionError, unknown

# Where the system does not say how large the last-level cache of the CPU is.
_DEFAULT_CACHE = 64 << 20


def pick_device(name: str | None) -> torch.device:
    """The device of that name; None: ``cuda`` where there is one, else ``cpu``.

    Raises:
        OptionError: if it is neither, or there is no such GPU.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"(cpu|cuda)(:\d+)?", name) is None:
        raise OptionError(unknown("device", name, ("cpu", "cuda")))
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise OptionError(f"Device '{name}' was asked for, but torch finds no CUDA GPU here.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise OptionError(f"Device '{name}' does not exist; GPUs: {torch.cuda.device_count()}.")
    return device


def cache_size(device: torch.device) -> int:
    """Bytes of the last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [
        int(text[:-1]) << 10
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if (text := file.read_text().strip()).endswith("K")
    ]
    return max(sizes, default=_DEFAULT_CACHE)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        # Torch holds it for reuse.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return int(match[1]) << 10 if match else 4 << 30


def require_memory(needed: int, device: torch.device, what: str) -> None:
    """Refuses what cannot fit before any of it is made.

    Raises:
        OptionError: if fewer than ``needed`` bytes are free.
    """
    free = free_memory(device)
    if needed > free:
        raise OptionError(
            f"{what} needs about {needed / 2**30:,.1f} GiB on {device}, where "
            f"{free / 2**30:,.1f} GiB are free; ask for fewer tokens or a smaller batch."
        )


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine() -> dict[str, Any]:
    """Names and versions, for reports."""
    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": model[1] if model else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in ("kvpass", "torch", "transformers", "triton")}
        | {"python": platform.python_version()},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "checkout" if name == "kvpass" else "not installed"


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text() if file.exists() else ""
