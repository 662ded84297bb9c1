"""What `tests.test_ranks` runs on each rank: ``python -m tests.rank_worker FOLDER``."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AutoModelForCausalLM

import kvpass
import kvpass.backend
from kvpass import ranks
from kvpass.errors import KvpassError
from kvpass.plan import Plan
from kvpass.tensor.size import held_bytes
from tests.models import prompt

# Values leave the exact window token by token, keys in runs of 32: two in these steps.
STEPS = [60, *[1] * 40]
RECIPES: dict[str, dict[str, Any]] = {
    "fp": {"recipe": "fp"},
    "kivi-2bit": {"recipe": "kivi-2bit", "residual": 32},
}


@contextmanager
def compiled(model: Any, **options: Any) -> Iterator[Any]:
    """``model`` with these options, until the end."""
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend="kvpass", options={"inner": "eager", **options})
    yield model
    model._compiled_call_impl = None


def run(model: Any, steps: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """The logits of a text in steps of these lengths, and its cache."""
    logits, cache = [], None
    with torch.no_grad():
        for ids in prompt(1, sum(steps)).split(steps, dim=1):
            # Dynamo cannot trace a sharded embedding of ids with variable strides.
            out = model(
                ids.clone(memory_format=torch.contiguous_format),
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
            cache = out.past_key_values
    return torch.cat(logits, dim=1), cache


def measured(model: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The logits of a text, and what was compiled and stored for it."""
    logits, cache = run(model, STEPS)
    handles = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return logits, {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "heads": handles[0].shape[1],
        "bytes": held_bytes(handles),
    }


def compared(whole: Any, split: Any, **options: Any) -> dict[str, Any]:
    """Both models with the same options: what they hold, and how far their logits are apart."""
    with compiled(whole, **options):
        wanted, alone = measured(whole)
        alone["events"] = events(whole)
    with compiled(split, **options):
        got, shared = measured(split)
        shared["events"] = events(split)
    return {"alone": alone, "shared": shared, "difference": float((got - wanted).abs().max())}


def events(model: Any) -> list[tuple[str, bool, str]]:
    """What rules did in the graphs of the last compile."""
    graphs = kvpass.explain(model).graphs[-counters["stats"]["unique_graphs"] :]
    return [(e.rule, e.fired, e.detail.split(" (at ")[0]) for g in graphs for e in g.events]


def message(run: Callable[[], Any]) -> str:
    """What the error of ``run`` says."""
    try:
        run()
    except KvpassError as error:
        return str(error).split("\n")[0]
    return "no error"


def refusal(model: Any, **options: Any) -> str:
    """What the error of the first compile says."""
    with compiled(model, **options):
        return message(lambda: run(model, [8]))


def main(folder: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    split = AutoModelForCausalLM.from_pretrained(folder / "model", tp_plan="auto").eval()
    rank = dist.get_rank()
    found: dict[str, Any] = {n: compared(whole, split, **x) for n, x in RECIPES.items()}
    found["plan"] = compared(whole, split, recipe=str(folder / "plan.safetensors"))
    for name in ("spanning", "other"):
        found[name] = refusal(split, recipe=str(folder / f"{name}.safetensors"))
    found["different"] = refusal(split, recipe=("kivi-2bit", "kivi-4bit")[rank])
    found["calibrate"] = message(lambda: kvpass.calibrate(split, "skvq-k2v2", [prompt(1, 200)]))
    plan = Plan.load(folder / "plan.safetensors")
    found["inplace"] = message(lambda: kvpass.fold_inplace(split, plan))
    ranks._PATIENCE = ranks._PATIENCE / 300
    found["alone"] = refusal(split, recipe="kivi-2bit") if rank == 0 else ""
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The numbers are those of the references: nothing has to be compiled.
    with patch("lowering.cpp.library.start_cpp", side_effect=InvalidCxxCompiler):
        main(Path(sys.argv[1]))
