"""Other runtimes as contenders of decoding: the same weights, tokens and number of threads."""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpass.bench import peer_llama_cpp, peer_openvino
from kvpass.bench.filling import LAYER_TOLERANCE, Setting, random_cache, step
from kvpass.bench.models import random_model
from kvpass.bench.timing import Contender, relative_error
from kvpass.errors import OptionError, unknown


class Runtime(Protocol):
    """A loaded model with a cache, which begins empty."""

    def decode(self, ids: Tensor) -> Tensor:
        """Logits ``[1, V]`` of the last of ids ``[1, n]``, which are behind all earlier ones."""

    def fill(self, cache: DynamicCache) -> None:
        """Takes the keys and values of ``cache`` in place of a prompt."""


# Relative error of logits that counts as right where keys and values are rounded to so many bits,
# for the first layer alone. An element is off by 0.5 % or 8 % of a standard deviation, of which
# attention as peaked as that of `random_model` makes up to 0.04 or 0.55 (measured with llama.cpp
# and OpenVINO, heads of 64 and 128, 1 to 4096 tokens); a wrong cache is off by 1.3 or more.
# Rounding adds up: behind all 12 layers of `small` 4 bits are off by 1.1, which tells nothing.
_ROUNDED = {8: 0.12, 4: 0.9}


@dataclass(frozen=True)
class Peer:
    """A runtime that decodes on CPUs.

    Attributes:
        packages: the distributions that it needs, and how they are imported.
        caches: the kinds of cache that it has, and the bits of an element.
        copies: of the weights, held at once by contenders of all kinds.
        write: writes the model into a folder; the file.
        start: loads the file, with a cache of that kind for so many tokens.
    """

    packages: Mapping[str, str]
    caches: Mapping[str, int]
    copies: int
    write: Callable[[Setting, Any, Path], Path]
    start: Callable[[Path, Setting, str, int], Runtime]


PEERS = {
    "llama.cpp": Peer(
        {"llama-cpp-python": "llama_cpp", "gguf": "gguf"},
        {"f16": 16, "f16, flash attention": 16, "q8_0": 8, "q4_0": 4},
        # All of them map one file.
        1,
        peer_llama_cpp.write_model,
        peer_llama_cpp.Runtime,
    ),
    "openvino": Peer(
        {"openvino": "openvino"},
        {"f16": 16, "u8": 8, "u4": 4},
        # Each has its own, and the model is copied when it is converted.
        5,
        peer_openvino.write_model,
        peer_openvino.Runtime,
    ),
}


def check_peers(names: Sequence[str]) -> None:
    """Refuses unknown peers.

    Raises:
        OptionError: if there are such.
    """
    for name in names:
        if name not in PEERS:
            raise OptionError(unknown("peer", name, PEERS))


def peer_contenders(
    names: Sequence[str], setting: Setting, model: Any, room: int, folder: Path
) -> list[Contender]:
    """A contender for each kind of cache of each peer, with room for so many tokens. Where one
    cannot run, its result says so. ``folder`` takes the files, which contenders go on reading."""
    subject = _Subject(setting, model, folder)
    return [
        _PeerDecoding(name, cache, subject, room).contender()
        for name in names
        for cache in PEERS[name].caches
    ]


@dataclass
class _Subject:
    """A model, its files for peers, and the logits that are expected."""

    setting: Setting
    model: Any
    folder: Path
    files: dict[str, Path] = field(default_factory=dict)

    def file(self, name: str) -> Path:
        """The file for the peer of that name."""
        if name not in self.files:
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            with torch.no_grad():
                self.files[name] = PEERS[name].write(self.setting, self.model, folder)
        return self.files[name]

    @cached_property
    def expected(self) -> Tensor:
        """Logits of the first step, with a plain cache."""
        cache = DynamicCache(config=self.setting.config)
        with torch.no_grad():
            if self.setting.fill == "random":
                random_cache(self.setting, cache)
            else:
                step(self.model, self.setting.ids(self.setting.context), cache)
            return step(self.model, self.setting.ids(1), cache)

    @cached_property
    def first_layer(self) -> _Subject:
        """The same without the layers behind the first."""
        config = copy.deepcopy(self.setting.config)
        config.num_hidden_layers = 1
        model = random_model(config, self.setting.dtype, self.setting.device)
        model.load_state_dict(self.model.state_dict(), strict=False)
        return _Subject(replace(self.setting, config=config), model, self.folder / "first_layer")


@dataclass
class _PeerDecoding:
    """A peer with one kind of cache. Where that rounds to fewer than 16 bits, its first step is
    checked on the first layer alone, and must be finite for all of them."""

    name: str
    cache: str
    subject: _Subject
    room: int
    runtime: Runtime | None = None
    note: str = ""
    first_layer_error: float | None = None
    whole_error: float = math.nan

    @property
    def peer(self) -> Peer:
        """The runtime."""
        return PEERS[self.name]

    def contender(self) -> Contender:
        """The contender that takes a step at each call."""
        setting, bits = self.subject.setting, self.peer.caches[self.cache]
        ids = setting.ids(1)
        # A cache of float16 rounds as a model of float16 does.
        half = LAYER_TOLERANCE[torch.float16] * math.sqrt(setting.shape.layers)
        tolerance = _ROUNDED.get(bits) or max(setting.tolerance, half)

        def call() -> Tensor:
            assert self.runtime is not None
            return self.runtime.decode(ids)

        return Contender(
            f"{self.name}, {self.cache}", [call], self.error, tolerance,
            prepare=self.prepare, after_first=self.describe,
        )  # fmt: skip

    def prepare(self) -> None:
        """Loads the model and fills its cache.

        Raises:
            ImportError: if a package is missing.
            OptionError: if the runtime is not measured with this setting.
        """
        self.check()
        if self.peer.caches[self.cache] < 16:
            first = self.subject.first_layer
            logits = self.filled(first).decode(first.setting.ids(1))
            self.first_layer_error = relative_error(logits, first.expected)
        self.runtime = self.filled(self.subject)

    def check(self) -> None:
        """Refuses what is missing, and settings that are not measured."""
        setting, packages = self.subject.setting, self.peer.packages
        if not all(map(importlib.util.find_spec, packages.values())):
            needed = " and ".join(packages)
            raise ImportError(f"{self.name} needs {needed}: pip install 'kvpass[peers]'.")
        if setting.device.type != "cpu" or setting.batch != 1:
            raise OptionError("Peers are measured on the CPU and with batch 1 only.")
        if setting.config.model_type != "llama":
            kind = setting.config.model_type
            raise OptionError(f"Peers are measured with Llamas only, not with '{kind}'.")

    def filled(self, subject: _Subject) -> Runtime:
        """The runtime, with a cache that is filled as the setting says."""
        setting = subject.setting
        runtime = self.peer.start(subject.file(self.name), setting, self.cache, self.room)
        if setting.fill == "random":
            runtime.fill(random_cache(setting, DynamicCache(config=setting.config)))
            return runtime
        start = time.perf_counter()
        runtime.decode(setting.ids(setting.context))
        self.note = f"prefill {time.perf_counter() - start:.2f} s"
        return runtime

    def error(self, logits: Tensor) -> float:
        """The relative error of the first step."""
        self.whole_error = relative_error(logits, self.subject.expected)
        if self.first_layer_error is None or not math.isfinite(self.whole_error):
            return self.whole_error
        return self.first_layer_error

    def describe(self) -> str:
        """Note on versions, on how long a prompt took, and on what was checked."""
        parts = [f"{name} {version(name)}" for name in self.peer.packages]
        parts += [self.note] if self.note else []
        if self.first_layer_error is not None:
            parts.append(f"checked on its first layer (all layers: {self.whole_error:.1e})")
        return ", ".join(parts)
