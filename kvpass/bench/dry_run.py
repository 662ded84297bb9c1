"""``kvpass bench gpu --dry-run``: a model's whole way to a GPU, without one.

A tiny model of fake tensors goes through Dynamo, the rules and Inductor, and every generated kernel
is compiled for the GPU as Inductor compiles it. In place of the compiled graphs, which nothing
could run, their ops are asked for shapes, so that a prompt and decode steps follow each other as
they would.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import kvpass.backend  # noqa: F401  (makes backend="kvpass" known without installation)
from kvpass import inner
from kvpass._torch_gpu import (
    DataDependentError,
    InductorGraph,
    InductorKernel,
    WatchWaits,
    record_inductor,
    simulated_gpu,
    stand_in,
)
from kvpass._torch_inductor import Compile
from kvpass.bench.models import Shape
from kvpass.bench.plans import layer_plan
from kvpass.errors import KernelError
from kvpass.folding import Fold
from kvpass.format import channels, groups, quantize
from kvpass.format.dtypes import dtype_name
from kvpass.graph.bind import constants
from kvpass.inspect.report import GraphReport, reports
from kvpass.ops.library import NAMES, REFERENCES
from kvpass.plan import Plan
from kvpass.recipes import written_recipe
from kvpass.report import Section
from kvpass.runtime import PackedCallable

# Heads of an 8B Llama, and fewer of them.
HEAD_DIM = 128
_SHAPE = Shape(2, 512, 256, 4, 2, HEAD_DIM, 128)
# Tokens of a prompt and of each step, and those that a static cache has room for.
_LENGTHS, _ROOM = (300, 1, 1), 512
# Ops whose references read lengths on the host.
_WAITING = tuple(f"{op} by aten" for op in ("append", "append_attention", "attention", "unpack"))
# What keeps tensors of a device: those of this one must not be met again.
_REMEMBERED = (
    (quantize, "_constant"), (groups, "_members"), (channels, "_read"),
    (channels, "_order_and_inverse"),
)  # fmt: skip
_ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Route:
    """A way to a GPU: a recipe's name, the model's dtype, ``dynamic`` or ``static`` cache, the
    batch, and the compute capability of the GPU."""

    recipe: str
    dtype: torch.dtype
    cache: str
    batch: int
    capability: int

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"{self.recipe} {dtype} {self.cache} B={self.batch} sm_{self.capability}"


@dataclass(frozen=True)
class GraphFindings:
    """Findings about one compiled graph, of kind ``prefill`` or ``decode``.

    Attributes:
        kernels: all that Inductor compiles.
        providers: how many ops each provider computes, e.g. ``append by triton``.
        clones: operations that read or write a cache tensor beside the kernels.
        waits: where the host waits for the device.
        refused: parts of the cache that stay plain, and why.
        inputs, static: of the compiled graph; those that are the same memory in most calls.
        obstacle: why CUDA graphs may not replay it, or empty.
    """

    kind: str
    kernels: tuple[InductorKernel, ...]
    providers: dict[str, int]
    clones: tuple[str, ...]
    waits: tuple[str, ...]
    refused: tuple[str, ...]
    inputs: int
    static: int
    obstacle: str

    @property
    def failed(self) -> list[InductorKernel]:
        """Kernels that do not compile."""
        return [kernel for kernel in self.kernels if kernel.problem]

    @property
    def right(self) -> bool:
        """Whether a GPU would run it as it should. Waits are known where PyTorch serves an op, and
        where the cache is made."""
        known = self.kind != "decode" or any(op in _WAITING for op in self.providers)
        return not self.failed and not self.clones and (known or not self.waits)


@torch.no_grad()
def dry_run(route: Route) -> list[GraphFindings]:
    """Takes a tiny model through a prompt and decode steps.

    Returns:
        What was found of each graph, in the order of compilation.

    Raises:
        OptionError, PlanError: if there is no such recipe, or it does not fit.
        KernelError: if there is no Triton, or no C++ compiler where this PyTorch knows no GPU.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelError("Nothing can be compiled for a GPU: triton is not installed.")
    plan = _plan(route.recipe)
    torch.compiler.reset()
    first = max((r.index + 1 for r in reports()), default=0)
    waits: dict[int, list[str]] = {}
    with simulated_gpu(route.capability) as fake, record_inductor() as made:
        with fake, torch.device("cuda"), _watched(waits):
            config = _SHAPE.config()
            model = LlamaForCausalLM._from_config(config, dtype=route.dtype).eval()
            options = {"recipe": plan, "mode": "reduce-overhead"}
            model.compile(backend="kvpass", options=options)
            static = route.cache == "static"
            cache = StaticCache(config, _ROOM) if static else DynamicCache(config=config)
            for length in _LENGTHS:
                ids = torch.zeros(route.batch, length, dtype=torch.int64)
                model(ids, past_key_values=cache, use_cache=True)
        found = [r for r in reports() if r.index >= first]
        return [_findings(r, g, waits.get(r.index, [])) for r, g in zip(found, made, strict=True)]


def _plan(name: str) -> Plan:
    """A plan of random tokens for two layers; one is important where a recipe has a share of
    important layers."""
    tokens = [torch.randn(1, _SHAPE.kv_heads, 256, HEAD_DIM, device="cpu") for _ in range(2)]
    if hasattr(written_recipe(name), "share"):
        layers = {str(i): layer_plan(f"{name},share={i}.0", *tokens) for i in range(2)}
        return Plan(layers["0"], layers, recipe=name)
    return Plan(layer_plan(name, *tokens), recipe=name)


class _Shapes(Interpreter):
    """Runs a graph on fake tensors. Ops that PyTorch serves run as their references do, which shows
    where they wait for the device."""

    def __init__(self, module: GraphModule, waits: list[str]) -> None:
        # As Inductor does: what nobody reads is not computed.
        read = GraphModule(module, module.graph)
        read.graph.eliminate_dead_code()
        super().__init__(read)
        self._waits = waits

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes the shapes of a node's result."""
        if (name := NAMES.get(target)) is not None:
            try:
                return REFERENCES[name](*args, **kwargs)
            except DataDependentError:
                self._waits.append(f"kvpass::{name} by aten")
        return super().call_function(target, args, kwargs)


@contextmanager
def _watched(waits: dict[int, list[str]]) -> Iterator[None]:
    """Runs compiled graphs, inside, on fake tensors; collects where each waits, by its report's
    index."""
    call = PackedCallable.__call__
    running: list[list[str]] = []

    def compile_and_fake(
        module: GraphModule, examples: list[Any], compile_one: Compile
    ) -> tuple[Callable[..., Any], tuple[int, int]]:
        compile_one(module, examples)

        def run(*inputs: Any) -> Any:
            return _Shapes(module, running[-1]).run(*map(_own, inputs))

        return run, (1, 1)

    def watched_call(callee: PackedCallable, *args: Any) -> Any:
        running.append(waits.setdefault(callee.report.index, []))
        with WatchWaits(_place, running[-1]):
            return call(callee, *args)

    patches = [
        (inner, "compile_regions", compile_and_fake),
        (PackedCallable, "__call__", watched_call),
        (constants, "on_device", stand_in),
        (Fold, "__call__", lambda _, weight: torch.empty_like(weight)),
        *((module, name, getattr(module, name).__wrapped__) for module, name in _REMEMBERED),
    ]
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.enter_context(patch.object(owner, name, new))
        yield


def _own(x: Any) -> Any:
    """A tensor of the mode that is on, for one of Dynamo's."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _place() -> str:
    """The innermost line of kvpass, beside this file and what is private to it, that is running."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        path = Path(frame.f_code.co_filename)
        inside = any(path.is_relative_to(_ROOT / package) for package in ("kvpass", "lowering"))
        if inside and path.name not in ("dry_run.py", "_torch_gpu.py"):
            return f"{path.relative_to(_ROOT)}:{line}"
    return "an unknown line"


def _findings(report: GraphReport, made: InductorGraph, waits: Sequence[str]) -> GraphFindings:
    obstacle = report.capture_obstacle or made.capture_problem
    moving = [i for i in made.mutated if i not in made.static]
    if not obstacle and moving:
        obstacle = f"inputs {moving} are written and move"
    return GraphFindings(
        kind=report.kind,
        kernels=tuple(made.kernels),
        providers=dict(Counter(f"{c.op} by {c.provider}" for c in report.choices)),
        clones=tuple(_clones(report.bound.graph, made.lowered)),
        waits=tuple(dict.fromkeys(waits)),
        refused=tuple(f"{e.path}: {e.detail}" for e in report.events if e.required and not e.fired),
        inputs=made.inputs,
        static=len(made.static),
        obstacle=obstacle,
    )


def _clones(bound: Graph, lowered: Graph) -> Iterator[str]:
    """Operations of ``lowered`` on the tensors that ops of ``bound`` have as state, but for kernels
    and for those ops."""
    state = {
        x
        for node in bound.nodes
        if node.op == "call_function" and "kvpass" in str(node.target)
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)
        if argument.name in ("state", "keys", "values")
        for x in value
    }
    inputs = (graph.find_nodes(op="placeholder") for graph in (bound, lowered))
    for before, placeholder in zip(*inputs, strict=False):
        for user in placeholder.users if before in state else ():
            name = str(user.target)
            known = ("kvpass", "sym_size", "triton_kernel_wrapper")
            # What is written where it stands is copied to itself, which compiles to nothing.
            itself = user.args == (placeholder, placeholder)
            if not itself and not any(part in name for part in known):
                yield f"{name} of {placeholder.name}"


def dry_run_section(route: Route, found: Sequence[GraphFindings]) -> Section:
    """The table of a route: a row for each graph."""
    header = ["graph", "kernels", "failed", "clones", "waits", "static inputs", "CUDA graph"]
    rows, notes = [], []
    for graph in found:
        own = sum(kernel.own for kernel in graph.kernels)
        rows.append([
            graph.kind, f"{own} + {len(graph.kernels) - own}", str(len(graph.failed)),
            str(len(graph.clones)), str(len(graph.waits)), f"{graph.static} of {graph.inputs}",
            "no" if graph.obstacle else "yes",
        ])  # fmt: skip
        notes.append(f"{graph.kind}: {', '.join(f'{p} x{n}' for p, n in graph.providers.items())}")
        notes += [f"{k.name} does not compile: {k.problem}" for k in graph.failed]
        notes += [f"clone: {clone}" for clone in graph.clones]
        notes += [f"waits: {wait}" for wait in graph.waits]
        notes += [f"stays plain: {refusal}" for refusal in graph.refused]
        notes += [f"no CUDA graph: {graph.obstacle}"] if graph.obstacle else []
    return Section(str(route), header, rows, notes)


def dry_run_json(route: Route, found: Sequence[GraphFindings]) -> list[dict[str, Any]]:
    """A row for each graph, with all that was found of it."""
    return [
        {"route": str(route), "right": graph.right}
        | vars(graph)
        | {
            "kernels": [k.name for k in graph.kernels],
            "failed": {k.name: k.problem for k in graph.failed},
        }
        for graph in found
    ]
