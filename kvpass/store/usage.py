"""What a store has been good for, and the clock that tells."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvpass._torch import compile_seconds
from kvpass.machine import synchronize


@dataclass(frozen=True)
class StoreStatistics:
    """What a store has been good for.

    Attributes:
        files, nbytes: saved caches and their bytes, of all processes.
        plain_nbytes: bytes of their tensors, without compression.
        lookups, hits: prompts that this object was asked for, and those with a stored prefix.
        tokens: that were found in place of being computed.
        seconds_saved: an estimate: what these tokens took to compute when they were stored, less
            what finding and loading them took. Compiling counts nowhere.
    """

    files: int
    nbytes: int
    plain_nbytes: int
    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    seconds_saved: float = 0.0

    def with_hit(self, tokens: int, seconds: float) -> StoreStatistics:
        """These, and one more prompt with so many stored tokens, which saved ``seconds``."""
        return replace(
            self,
            hits=self.hits + 1,
            tokens=self.tokens + tokens,
            seconds_saved=self.seconds_saved + seconds,
        )

    @property
    def compression(self) -> float:
        """How many times smaller files are than their tensors; 1 for no files."""
        return self.plain_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        smaller = f", compressed {self.compression:.2f} times" if self.compression > 1 else ""
        return (
            f"{self.hits} of {self.lookups} prompts had a stored prefix, {self.tokens:,} tokens in "
            f"all, which saved about {self.seconds_saved:.1f} s; {self.files} caches in "
            f"{self.nbytes:,} bytes{smaller}"
        )


class Clock(LogitsProcessor):
    """The seconds from its making to `stop`, or to the first token, without those of compiling."""

    def __init__(self) -> None:
        self._start, self._compiled = time.perf_counter(), sum(compile_seconds())
        self.seconds = 0.0

    def stop(self, device: torch.device) -> None:
        """Reads the time when ``device`` has done its work."""
        synchronize(device)
        compiled = sum(compile_seconds()) - self._compiled
        self.seconds = max(time.perf_counter() - self._start - compiled, 0.0)

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        """The ``scores`` as they are."""
        if not self.seconds:
            self.stop(scores.device)
        return scores
