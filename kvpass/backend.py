"""The ``torch.compile`` backend: named passes, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from kvpass._torch import copy_module, is_traced, register_backend_once
from kvpass._torch_inductor import inductor_modes
from kvpass.errors import OptionError, unknown
from kvpass.fingerprint import check_weights
from kvpass.graph.analysis.sites import find_sites, module_path
from kvpass.graph.bind.state import bind_state
from kvpass.graph.specialize import specialize
from kvpass.graph.verify import verify_rewritten
from kvpass.inner import InnerCompiler, wants_replay
from kvpass.inspect.notices import publish, warn_of_refusals
from kvpass.inspect.report import new_report
from kvpass.options import parse_options
from kvpass.plan import Plan
from kvpass.ranks import agree_to_shard, agreed_ranks
from kvpass.rules import DECODING, Context, Event, apply_rules
from kvpass.rules.diagnostics import bias_warnings, large_key_biases
from kvpass.runtime import PackedCallable

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
    inner = InnerCompiler(binding, mode, opts, report).compile(module)
    publish(report)
    return PackedCallable(inner, binding, report)


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


register_backend_once(kvpass)
