"""What `tests.test_shards` runs on each rank: ``python -m tests.shard_worker FOLDER NAME ...``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import StaticCache

import kvpass
from examples import long_context_distributed
from kvpass._torch import all_gathered
from kvpass.tensor.size import held_bytes
from tests.cocktail.requests import any_bits, run_request
from tests.harness import left_padding, run_steps
from tests.models import prompt, tiny_model
from tests.rank_worker import compiled, message

# From one block of 128 tokens into the next one, and beyond a flush; then back into a group, and
# on with other rows.
STEPS, TAKEN_BACK, MORE = [370, *[1] * 20], 13, [1] * 8
# With padding: several tokens at once, and a second prompt.
PADDED = [150, 1, 5, 120, 1]
PADS = [20, 3, 0]
# Back into a chunk; and a prompt behind it.
CUT, FURTHER = 186, 150
# More than the least room on each of two ranks.
PROMPT = 1100
RECIPES: dict[str, dict[str, Any]] = {
    "fp": {"recipe": "fp"},
    "kivi-2bit": {"recipe": "kivi-2bit", "residual": 32},
    # Its sinks fill no group.
    "rotated-4bit": {"recipe": "rotated-4bit", "group": 16},
}


def stepped(model: Any) -> tuple[torch.Tensor, Any]:
    """The logits of two texts, of which the last tokens are taken back and one takes the place of
    the other, and their cache."""
    ids = prompt(2, sum(STEPS) + 2 * len(MORE))
    first, second, third = ids.split([sum(STEPS), len(MORE), len(MORE)], dim=1)
    logits, cache = run_steps(model, first, STEPS)
    cache.crop(-TAKEN_BACK)
    more, cache = run_steps(model, second, MORE, cache=cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    last, cache = run_steps(model, third, MORE, cache=cache)
    return torch.cat([logits, more, last], dim=1), cache


def padded(model: Any) -> tuple[torch.Tensor, Any]:
    """The logits of three texts of other lengths, without those of padding, and their cache."""
    ids, mask = prompt(3, sum(PADDED)), left_padding(PADS, sum(PADDED))
    logits, cache = run_steps(model, ids, PADDED, mask)
    return logits[mask.bool()], cache


def with_chunks(model: Any) -> tuple[torch.Tensor, Any]:
    """As `stepped`, with chunks, one of which is cut through, and a second prompt."""
    ids = prompt(2, sum(STEPS) + len(MORE) + FURTHER + 1)
    first, second, third = ids.split([sum(STEPS), len(MORE), FURTHER + 1], dim=1)
    logits, cache = run_request(model, first, STEPS, any_bits(2, STEPS[0], seed=5, chunk=32))
    cache.crop(-CUT)
    more, cache = run_steps(model, second, MORE, cache=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    bits = any_bits(2, FURTHER, seed=5, chunk=32)
    last, cache = run_request(model, third, [FURTHER, 1], bits, cache=cache)
    return torch.cat([logits, more, last], dim=1), cache


def padded_chunks(model: Any) -> tuple[torch.Tensor, Any]:
    """As `padded`, with chunks, of a longer prompt."""
    steps = [600, *PADDED[1:]]
    ids, mask = prompt(3, sum(steps)), left_padding(PADS, sum(steps))
    bits = any_bits(3, steps[0], seed=4, chunk=32)
    logits, cache = run_request(model, ids, steps, bits, mask)
    return logits[mask.bool()], cache


def run_text(model: Any, steps: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """The logits of a text in steps of these lengths, and its cache."""
    return run_steps(model, prompt(1, sum(steps)), steps)


def handles(cache: Any) -> list[Any]:
    """The tensors of a cache."""
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def facts(cache: Any) -> dict[str, Any]:
    """What a cache holds, and for how many graphs that were compiled."""
    held, graphs = handles(cache), counters["stats"]["unique_graphs"]
    return {"graphs": graphs, "bytes": held_bytes(held), "kinds": [type(x).__name__ for x in held]}


def sent(model: Any) -> list[list[str]]:
    """The shapes that each graph gathers."""
    graphs = kvpass.explain(model).graphs[-counters["stats"]["unique_graphs"] :]
    calls = [[n for n in g.bound.graph.nodes if n.target is all_gathered] for g in graphs]
    return [[str(tuple(n.meta["example_value"].shape)) for n in nodes] for nodes in calls]


def compared(
    model: Any, shard: Any, run: Any = stepped, whole: Any = None, **options: Any
) -> dict[str, Any]:
    """What ranks hold, and how far their logits are from those of a process alone, which has the
    ``whole`` of a model with some of the heads."""
    with compiled(model, shard=shard, **options):
        logits, cache = run(model)
        # All bits.
        digest = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
        found = {**facts(cache), "sent": sent(model), "logits": digest}
        found["warnings"] = [w for g in kvpass.explain(model).graphs for w in g.warnings]
        together = [x.decode() for x in handles(cache)]
    if dist.get_rank() == 0:
        whole = model if whole is None else whole
        with compiled(whole, **options):
            wanted, cache = run(whole)
            found["alone"] = facts(cache)
            pairs = zip(together, (x.decode() for x in handles(cache)), strict=True)
        found["difference"] = float((logits - wanted).abs().max())
        found["stored"] = max(float((a - b[:, : a.shape[1]]).abs().max()) for a, b in pairs)
    return found


def with_heads_apart(whole: Any) -> dict[str, Any]:
    """`compared` on a mesh whose other dimension has the heads."""
    mesh, model = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tokens", "heads")),
        deepcopy(whole),
    )
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    for layer in model.model.layers:
        layout = {**columns, "o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh["heads"], layout)
    return compared(model, mesh["tokens"], whole=whole, **RECIPES["kivi-2bit"])


def refusals(model: Any, world: Any) -> dict[str, str]:
    """What errors say."""
    kivi, found = RECIPES["kivi-2bit"], {}

    def refusal(run: Any = lambda: run_steps(model, prompt(1, 8), [8]), **options: Any) -> str:
        with compiled(model, **options):
            return message(run)

    cache = StaticCache(config=model.config, max_cache_len=64)
    found["static"] = refusal(
        lambda: run_steps(model, prompt(1, 8), [8], cache=cache), shard=world, **kivi
    )
    found["number"] = refusal(shard=3)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tokens"))
    found["mesh"] = refusal(shard=mesh)
    found["mesh of one dimension"] = refusal(shard=mesh["tokens"], **kivi)
    with compiled(model, shard=world, **kivi):
        one, other = prompt(1, 140), prompt(1, 140, seed=dist.get_rank())
        found["prompts"] = message(lambda: run_steps(model, other, [140]))
        _, cache = run_steps(model, one, [140])
        found["tokens"] = message(lambda: run_steps(model, other[:, :1], [1], cache=cache))
        found["tokens"] += f" {cache.get_seq_length()}"
    found["different"] = refusal(shard=world, recipe=("fp", "kivi-2bit")[dist.get_rank() % 2])
    return found


def filled(model: Any, world: Any, folder: Path) -> dict[str, Any]:
    """The bytes of a cache behind its prompt, and whether it can be saved."""
    with compiled(model, shard=world, **RECIPES["kivi-2bit"]):
        ids = prompt(1, PROMPT)
        _, cache = run_steps(model, ids, [PROMPT])
        to, held = folder / "cache.safetensors", facts(cache)["bytes"]
        saved = message(lambda: kvpass.save_cache(cache, to, model=model, tokens=ids))
    return {"bytes": held, "saved": saved}


def lost(model: Any, world: Any) -> str:
    """What the first rank is told where the others end."""
    with compiled(model, shard=world, recipe="fp"):
        _, cache = run_steps(model, prompt(1, 140), [140])
        dist.barrier()
        if dist.get_rank() > 0:
            return ""
        ids = prompt(1, 1)
        told = message(lambda: run_steps(model, ids, [1], cache=cache))
        return f"{told} {cache.get_seq_length()}"


def main(folder: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    world, rank = dist.group.WORLD, dist.get_rank()
    model = tiny_model("llama", layers=1)
    plans = {path.stem: {"recipe": str(path)} for path in sorted(folder.glob("*.safetensors"))}
    recipes = {n: x for n, x in (RECIPES | plans).items() if not names or n in names}
    found: dict[str, Any] = {n: compared(model, world, **x) for n, x in recipes.items()}
    if dist.get_world_size() == 4:
        found["heads apart"] = with_heads_apart(model)
    if not names:
        found["padded"] = compared(model, world, padded, **RECIPES["kivi-2bit"])
        found["chunks"] = compared(model, world, with_chunks, recipe="cocktail", inner="inductor")
        found["padded chunks"] = compared(model, world, padded_chunks, recipe="cocktail")
        reader, text = tiny_model("diffllama", layers=1), partial(run_text, steps=[270, 1, 1])
        found["decoded"] = compared(reader, world, text, recipe="fp")
        sizes = ["--prompt-tokens", "600", "--part-tokens", "300", "--new-tokens", "3"]
        args = long_context_distributed.arguments([*sizes, "--inner", "eager", "--recipe", "fp"])
        found["example"] = long_context_distributed.report(args, "cpu")
        found["refusals"] = refusals(model, world)
        found["filled"] = filled(model, world, folder)
        found["lost"] = lost(model, world)
    (folder / f"rank{rank}of{dist.get_world_size()}.json").write_text(json.dumps(found))
    # There may be nobody to part with.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The numbers are those of the references: nothing has to be compiled.
    with patch("lowering.cpp.library.start_cpp", side_effect=InvalidCxxCompiler):
        main(Path(sys.argv[1]), sys.argv[2:])
