"""The ``torch.compile`` backend: named passes, top to bottom. Only this file and the command line
import `lowering`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import lowering
from kvpass._torch import (
    copy_graph_facts,
    copy_source,
    is_traced,
    lazy_module,
    register_backend_once,
)
from kvpass._torch_calls import CompiledModule
from kvpass._torch_cpp import cpp_problem
from kvpass._torch_inductor import inductor, inductor_modes, wants_cuda_graphs
from kvpass.errors import OptionError, unknown
from kvpass.fingerprint import check_weights
from kvpass.graph.analysis.sites import Sites, find_sites, module_path
from kvpass.graph.bind.binding import Binding
from kvpass.graph.bind.capture import capture_obstacle, makes_cache
from kvpass.graph.bind.state import bind_state
from kvpass.graph.specialize import specialize
from kvpass.graph.verify import verify_bound, verify_rewritten
from kvpass.inspect.notices import publish, warn_of_refusals, warn_once
from kvpass.inspect.report import GraphReport, new_report
from kvpass.options import Options, parse_options
from kvpass.plan import Plan
from kvpass.ranks import agree_to_shard, agreed_ranks
from kvpass.regional import compile_regions
from kvpass.replay import Replayed, changed_arguments, replay_obstacle
from kvpass.rules import BOUND_RULES, DECODING, Context, Event, apply_rules
from kvpass.rules.diagnostics import bias_warnings, large_key_biases
from kvpass.runtime import PackedCallable
from lowering import TUNE_VARIABLE as TUNE_VARIABLE
from lowering import compile_ahead as compile_ahead
from lowering import tunings as tunings

log = logging.getLogger(__name__)
# Without a usable C++ compiler.
_SLOWER = "{}; the graph runs op by op with ATen, more slowly"
_HOOKED = (
    "accelerate's hooks, which device_map and offloading put before every module, break the model "
    "into graphs that update no KV cache: nothing is packed. Load it on one device, or on several "
    "by tp_plan='auto'"
)


def kvpass(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles Dynamo's graph so that the KV cache it updates stays packed.

    Args:
        gm: Dynamo's graph.
        example_inputs: its example arguments.
        mode: Inductor's mode. With ``reduce-overhead`` decode steps are replayed, by CUDA graphs on
            a GPU and by `kvpass.replay` on a CPU, where nothing stands against it
            (`GraphReport.capture_obstacle`, ``replay_obstacle``); on a CPU without a mode, too.
        options: see `kvpass.options.parse_options`.

    Raises:
        OptionError: if an option is not allowed.
        PlanError: if the recipe does not fit the model.
        UnmatchedGraphError: with ``strict``, if part of the cache cannot be packed.
    """
    opts = parse_options(options)
    mode = mode or opts.mode
    if mode is not None and mode not in inductor_modes():
        raise OptionError(unknown("mode", mode, inductor_modes()))
    module, examples, planner = copy_module(gm), list(example_inputs), opts.planner
    name = planner.recipe if isinstance(planner, Plan) else planner.name
    report = new_report(name, copy_module(gm), examples)
    if isinstance(planner, Plan) and planner.calibration is not None:
        check_weights(module.graph, examples, planner.calibration.weights)
    replayed = wants_replay(mode, opts.inner, examples)
    ranks = agreed_ranks(examples, planner)
    agree_to_shard(opts.shard, planner)
    with report.timed("find sites"):
        specialize(module.graph)
        sites = find_sites(module.graph)
        context = Context(
            module.graph, sites, planner, replayed=replayed, ranks=ranks, shard=opts.shard
        )
    with report.timed("apply rules"):
        biases = large_key_biases(context, examples)
        report.events = rewrite(context, examples)
        report.roles = context.sites.update_roles()
    with report.timed("verify"):
        report.warnings += context.warnings + bias_warnings(context, biases)
        if not report.events and runs_in_hooks(module.graph):
            report.warnings.append(_HOOKED)
        verify_rewritten(module.graph)
        module.recompile()
        report.after = copy_module(module)
    warn_of_refusals(report, opts.strict)
    with report.timed("bind state"):
        binding = bind_state(module.graph, examples, replayed)
    with report.timed("fold weights"):
        for fold in binding.folds:
            if not is_traced(examples[fold.position]):
                fold(examples[fold.position])
    inner = lower_and_compile(module, binding, examples, mode, opts, report)
    if problem := lowering.compiler_problem(report.choices):
        warn_once(_SLOWER.format(problem), report)
    publish(report)
    return PackedCallable(inner, binding, report)


def copy_module(gm: GraphModule) -> GraphModule:
    """A copy to work on: Dynamo reads its own placeholders after the backend has returned."""
    mapping: dict[Any, Any] = {}
    graph = Graph()
    output = graph.graph_copy(gm.graph, mapping)
    graph.output(output)
    for old, new in mapping.items():
        copy_source(old, new)
        # A weak reference to the real argument, which Dynamo drops after compilation.
        new.meta.pop("grapharg", None)
    # Most copies are for reports, and nobody asks for their code.
    copied = lazy_module(gm, graph)
    copied.meta = dict(gm.meta)
    copy_graph_facts(gm, copied)
    return copied


def runs_in_hooks(graph: Graph) -> bool:
    """Whether accelerate calls the module whose graph this is: Dynamo traces none of its hooks."""
    hooks = str(Path("accelerate", "hooks.py"))
    return any(hooks in (node.meta.get("stack_trace") or "") for node in graph.nodes)


def rewrite(context: Context, examples: Sequence[Any]) -> list[Event]:
    """Applies the rules, unless the graph is to be differentiated: packing has no gradient."""
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in examples
    ):
        reason = "gradients are enabled; call the model under torch.no_grad()"
        for node in context.sites.updates:
            context.refused[node] = f"{reason} (at {node.name})"
        events = [
            Event("quantize_cache", node.name, module_path(node), False, detail)
            for node, detail in context.refused.items()
        ]
        return events + apply_rules(context, DECODING)
    return apply_rules(context) + apply_rules(context, DECODING)


def lower_and_compile(
    module: GraphModule,
    binding: Binding,
    examples: Sequence[Any],
    mode: str | None,
    opts: Options,
    report: GraphReport,
) -> Callable[..., Any]:
    """The inner graph as a callable. The kernels of its ops are compiled while Inductor compiles
    the rest; only if one cannot be compiled, all is done again with what computes its op then."""
    events = list(report.events)
    wanted = wants_replay(mode, opts.inner, examples)
    may_be_replayed = wanted and capture_obstacle(binding, ()) is None
    while True:
        lowered = copy_module(module)
        with report.timed("lower"):
            bound = Context(
                lowered.graph,
                Sites(),
                opts.planner,
                replayed=may_be_replayed,
                served_by=lowering.served_by,
            )
            report.events = events + apply_rules(bound, BOUND_RULES)
            report.choices = lowering.lower(lowered.graph)
            report.kernels = lowering.generated_files
            verify_bound(lowered.graph)
            lowered.recompile()
            report.bound = copy_module(lowered)
        check_capture(binding, examples, mode, report)
        modules: list[CompiledModule] = []
        with report.timed("inner compile"):
            inner = compile_inner(
                lowered, list(binding.examples), mode, opts.inner, report, modules
            )
        with report.timed("lower"):
            if not lowering.failed_kernels():
                return replay_steps(inner, lowered, binding, mode, report, modules)


def replay_steps(
    inner: Callable[..., Any],
    module: GraphModule,
    binding: Binding,
    mode: str | None,
    report: GraphReport,
    modules: Sequence[CompiledModule],
) -> Callable[..., Any]:
    """On a CPU: what makes the calls of a step again, if nothing stands against it."""
    examples = binding.examples
    wanted = report.inner == "inductor" and wants_replay(mode, report.inner, examples)
    if not wanted or _on_gpu(examples) or makes_cache(binding):
        return inner

    def tell(reason: str) -> None:
        report.replay_obstacle = reason
        if mode is not None:
            warn_once(f"mode={mode!r}: no step is replayed, for {reason}", report)

    reason = report.capture_obstacle or replay_obstacle(module.graph, examples, binding.state)
    if reason is None and len(modules) != report.regions[1]:
        reason = "not all of its code is known"
    if reason is not None:
        tell(reason)
        return inner
    return Replayed(inner, modules, changed_arguments(module.graph), lowering.repeat, tell)


def wants_replay(mode: str | None, compiler: str, examples: Sequence[Any]) -> bool:
    """Whether decode steps are to be replayed: by CUDA graphs if the mode asks for them, as
    torch.compile does it, and on a CPU unless a mode says otherwise."""
    by_default = mode is None and compiler == "inductor" and not _on_gpu(examples)
    return wants_cuda_graphs(mode) or by_default


def _on_gpu(examples: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in examples)


def check_capture(
    binding: Binding, examples: Sequence[Any], mode: str | None, report: GraphReport
) -> None:
    """Whether CUDA graphs may replay the graph; warns if the mode asks for them in vain."""
    waiting = [choice.op for choice in report.choices if choice.waits]
    report.capture_obstacle = capture_obstacle(binding, waiting)
    # A prompt is compiled for its own length: nobody expects to replay it.
    wanted = _on_gpu(examples) and wants_cuda_graphs(mode) and not makes_cache(binding)
    if wanted and report.capture_obstacle is not None:
        reason = report.capture_obstacle
        warn_once(f"mode={mode!r}: no CUDA graph replays this step, for {reason}", report)


def compile_inner(
    module: GraphModule,
    examples: list[Any],
    mode: str | None,
    compiler: str,
    report: GraphReport,
    modules: list[CompiledModule],
) -> Callable[..., Any]:
    """Inductor's callable, whose code ``modules`` gets; where its C++ cannot be compiled the graph
    is run op by op."""
    report.inner = compiler
    if compiler == "eager":
        return module
    try:
        capture = report.capture_obstacle is None
        tag, direct = lowering.cache_tag(), lowering.direct_ops()
        with inductor(mode, tag, capture, direct, modules) as compile_one:
            compiled = compile_regions(module, examples, compile_one)
        # Kernels are there from here on.
        callee, report.regions = compiled
        return callee
    except Exception as error:
        problem = cpp_problem(error)
        if problem is None:
            raise
        log.debug("Inductor's error", exc_info=error)
        report.inner = "eager"
        warn_once(_SLOWER.format(problem), report)
        return module


def provider(op: str, *args: Any) -> tuple[Callable[..., Any], lowering.Choice]:
    """The function that a compiled graph would call for ``kvpass::<op>``, to be called outside one.

    Args:
        op: ``attention``, ``append``, ``pack``, ``unpack`` or one of pages.
        args: the arguments it is to be called with; they decide who can compute it.

    Returns:
        The best provider's callable, with the op's signature, and the choice: the provider's name
        and why better ones declined.
    """
    chosen, declined = lowering.choose(op, args, {})
    if lowering.failed_kernels():
        chosen, declined = lowering.choose(op, args, {})
    return chosen.target, lowering.Choice(op, op, chosen.name, declined, chosen.waits)


register_backend_once(kvpass)
