"""Draw the memory that generating 4,000 tokens takes, measured on the running process.

    python -m examples.plot_peak_memory --out examples/peak_memory.svg    # needs kvpass[plot]

On Linux. Every cache is measured in a process of its own, the small model generating for a batch
of sequences. What is plotted is the process's peak (``VmHWM``) since the token before, less what it
held before it began: the cache, its spare room, and all that a step allocates meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

import kvpass.backend
from examples import one_sentence
from examples.quickstart import SMALL_MODEL, held_out_ids, load
from examples.small_model_data import read_texts, training_files

PLAIN = "plain"
CACHES = (PLAIN, "kivi-4bit", "kvmix-k2.28v2.56", "kivi-2bit")
PROMPT, CALIBRATION = 64, 16
# glibc keeps what is freed, but what was mapped by itself goes back to the system at once.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plot the memory that generating takes.")
    parser.add_argument("--out", default="peak_memory.svg")
    parser.add_argument("--tokens", type=int, default=4000, help="to generate")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--caches", nargs="+", default=CACHES, help=f"'{PLAIN}' or recipes")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Peak(StoppingCriteria):
    """Notes the process's peak after every token, and sets it back; never stops."""

    def __init__(self, tokens: int, name: str) -> None:
        self.bytes: list[int] = []
        self._bar = tqdm(total=tokens, desc=name, leave=False)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """See `StoppingCriteria`."""
        self.bytes.append(resident("VmHWM"))
        forget_peak()
        self._bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def resident(what: str) -> int:
    """Bytes of this process in memory: ``VmRSS`` now, ``VmHWM`` at its peak."""
    match = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert match is not None
    return 1024 * int(match[1])


def forget_peak() -> None:
    """The peak of this process begins anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def measure(name: str, args: argparse.Namespace) -> list[int]:
    """Bytes above what the process held before, at the peak of every token."""
    model, tokenizer = load(str(SMALL_MODEL), args.dtype)
    if name != PLAIN:
        model.compile(backend="kvpass", options={"recipe": planner(name, args)})
    texts = held_out_ids(tokenizer, PROMPT, args.batch)
    ids = torch.stack([texts[i % len(texts)] for i in range(args.batch)])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    with torch.no_grad():
        # Compiles.
        model.generate(ids, max_new_tokens=4, **asked)
        gc.collect()
        before, peak = resident("VmRSS"), Peak(args.tokens, name)
        forget_peak()
        stop = StoppingCriteriaList([peak])
        model.generate(ids, max_new_tokens=args.tokens, stopping_criteria=stop, **asked)
    return [size - before for size in peak.bytes]


def planner(name: str, args: argparse.Namespace) -> Any:
    """The recipe, or its plan if it is calibrated."""
    recipe = kvpass.recipe(name)
    if not recipe.calibrated:
        return recipe
    model, tokenizer = load(str(SMALL_MODEL), args.dtype)
    texts = read_texts(training_files()[:: len(training_files()) // CALIBRATION])
    return kvpass.calibrate(model, recipe, texts, tokenizer=tokenizer, samples=CALIBRATION)


@one_sentence()
def main(argv: Sequence[str] | None = None) -> None:
    """Measures and draws."""
    args = arguments(argv)
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args)))
        return
    if not Path("/proc/self/clear_refs").exists():
        sys.exit("Peaks are read from /proc/self, which this system does not have.")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("Plotting needs matplotlib: pip install 'kvpass[plot]'.")
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for name in args.caches:
        command = [sys.executable, "-m", "examples.plot_peak_memory", "--measure", name]
        for option in ("tokens", "batch", "dtype"):
            command += [f"--{option}", str(getattr(args, option))]
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, check=True
        )
        peaks = [size / 2**20 for size in json.loads(done.stdout)]
        axes.plot(peaks, label=f"{args.dtype} cache" if name == PLAIN else name, linewidth=1)
        print(f"{name:<18} {max(peaks):7.1f} MiB at most", flush=True)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("MiB at the peak of a step")
    axes.set_title(f"{args.batch} sequences", fontsize="medium")
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
