"""Compares a compiled model of two layers with the oracle: after a prompt, single tokens and
several at once, with every kind of cache that a GPU serves."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass.bench.filling import LAYER_TOLERANCE
from kvpass.bench.models import Shape, layer_sizes, random_model
from kvpass.bench.plans import layer_plan
from kvpass.bench.timing import relative_error
from kvpass.format.dtypes import dtype_name
from kvpass.inspect.report import reports
from kvpass.oracle import oracle_cache
from kvpass.plan import Plan
from kvpass.zoo.families import tiny_config

# Two layers with the heads of an 8B Llama, and fewer of them.
SHAPE = Shape(2, 1024, 1024, 8, 2, 128, 1024)
# A prompt that is packed, tokens that pack more, several at once, and a second prompt.
STEPS = (300, 1, 1, 1, 1, 5, 1, 40, 1)
_ROOM = 512
# A model that writes its own cache rounds keys otherwise than another implementation does, and
# then they get other codes, or other outliers: in bf16 at 4 bits, the oracle itself is off by 0.15
# from the oracle in float32, and a plain cache by 0.35. How far ours may be off beside the oracle:
_RATIO = 1.5
# What is allowed of any model: twice the error of one whose cache is given.
_CODES = 2


@dataclass(frozen=True)
class ModelCase:
    """A model to be compared with its oracle.

    Attributes:
        cache: ``dynamic`` or ``static``.
        mode: of Inductor.
        family: of transformers, tiny; None: a Llama with heads of 128 channels.
        attention: transformers' name of an implementation.
    """

    recipe: str
    dtype: torch.dtype = torch.bfloat16
    cache: str = "dynamic"
    mode: str | None = None
    family: str | None = None
    attention: str = "sdpa"

    def __str__(self) -> str:
        dtype, cache = dtype_name(self.dtype), f"{self.cache} cache"
        return " ".join(
            filter(None, (self.family or "llama", self.recipe, dtype, cache, self.mode))
        )


# A decode step with both kinds of cache, and in CUDA graphs: what most depends on.
FIRST = (
    ModelCase("kivi-4bit"),
    ModelCase("kivi-4bit", cache="static", mode="reduce-overhead"),
    ModelCase("kivi-4bit", mode="reduce-overhead"),
)
# All else that a model may ask of the kernels: recipes as they are by default, their sinks among
# it, other dtypes (fp32 takes four warps), sliding windows, soft caps and attention sinks.
VARIANTS = (
    *(ModelCase(recipe) for recipe in ("kivi-2bit", "skvq-k2v2", "kvquant-nuq3-1%", "kvmix")),
    ModelCase("kivi-2bit", torch.float16, "static"),
    ModelCase("kivi-4bit", torch.float32),
    ModelCase("kivi-4bit", torch.float32, "static", "reduce-overhead"),
    ModelCase("kivi-4bit", torch.float16, "dynamic", None, "mistral"),
    ModelCase("kivi-4bit", torch.float16, "static", None, "mistral"),
    ModelCase("kivi-4bit", torch.float16, "dynamic", None, "gpt_oss", "eager"),
    ModelCase("kivi-4bit", torch.float16, "dynamic", None, "gemma2", "eager"),
)


@torch.no_grad()
def check_model(case: ModelCase, device: torch.device, inner: str = "inductor") -> dict[str, Any]:
    """Compares logits of every step with those of the oracle in float32.

    Returns:
        A row: the relative error, a quadratic mean over the steps, that of the oracle in the
        model's dtype, what is allowed, who computed what, and whether CUDA graphs may replay the
        step.
    """
    torch.compiler.reset()
    config = SHAPE.config() if case.family is None else tiny_config(case.family)
    model = random_model(config, case.dtype, device, case.attention)
    shape = layer_sizes(config)
    tokens = [torch.randn(1, shape.kv_heads, 256, shape.head_dim, device=device) for _ in range(2)]
    plan = Plan(layer_plan(case.recipe, *tokens), recipe=case.recipe)
    ids = torch.randint(8, 100, (1, sum(STEPS)), device=device)
    exact = copy.deepcopy(model).float()
    expected = _run(exact, ids, _oracle(plan, config, exact))
    own = _error(_run(model, ids, _oracle(plan, config, model)), expected)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"recipe": plan, "inner": inner, "mode": case.mode}
    twin.compile(backend="kvpass", options=options)
    first = max((r.index + 1 for r in reports()), default=0)
    static = case.cache == "static"
    cache = StaticCache(config, max_cache_len=_ROOM) if static else DynamicCache(config=config)
    error = _error(_run(twin, ids, cache), expected)
    made = [r for r in reports() if r.index >= first]
    floor = _CODES * LAYER_TOLERANCE[case.dtype] * math.sqrt(shape.layers)
    allowed = max(floor, _RATIO * own)
    return {
        "case": str(case),
        "error": error,
        "oracle_error": own,
        "allowed": allowed,
        "right": bool(error <= allowed),
        "providers": sorted({f"{c.op} by {c.provider}" for r in made for c in r.choices}),
        "refused": sorted({e.detail for r in made for e in r.events if e.required and not e.fired}),
        "no_cuda_graph": sorted({r.capture_obstacle or "" for r in made if r.kind == "decode"}),
    }


def _oracle(plan: Plan, config: Any, model: Any) -> Any:
    return oracle_cache(plan, config.get_text_config(decoder=True), model)


def _error(logits: list[Tensor], expected: list[Tensor]) -> float:
    """Step by step: a prompt's many logits, which no packed cache has touched, must not hide
    others."""
    errors = list(map(relative_error, logits, expected))
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def _run(model: Any, ids: Tensor, cache: Any) -> list[Tensor]:
    """Logits ``[1, n, V]`` of every step."""
    logits = []
    for part in ids.split(STEPS, dim=1):
        # A replayed CUDA graph overwrites what the last one returned.
        torch.compiler.cudagraph_mark_step_begin()
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        logits.append(out.logits.clone())
    return logits
