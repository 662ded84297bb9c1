"""What `tests.test_compiling` runs in a process of its own: ``python -m tests.start_worker
ARTIFACTS``. It starts with what the file holds, and prints what it found and computed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import kvpass.backend  # noqa: F401  (makes known what it keeps)
from tests.harness import compiled, run_steps
from tests.models import prompt, tiny_model


def start() -> list[float]:
    """The last logits of a tiny model after a prompt and a step."""
    twin = compiled(tiny_model("llama", layers=1), "kivi-4bit", "inductor")
    logits, _ = run_steps(twin, prompt(1, 21), [20, 1])
    return list(logits[0, -1].tolist())


if __name__ == "__main__":
    torch.compiler.load_cache_artifacts(Path(sys.argv[1]).read_bytes())
    logits = start()
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    print(json.dumps({"logits": logits, **found}))
