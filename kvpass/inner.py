"""From a bound graph to a callable: its ops by kernels, the rest by Inductor, its steps replayed.
Only this file and the command line import `lowering`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

import lowering
from kvpass._torch import copy_module
from kvpass._torch_calls import CompiledModule
from kvpass._torch_cpp import cpp_problem
from kvpass._torch_inductor import inductor, wants_cuda_graphs
from kvpass.graph.analysis.sites import Sites
from kvpass.graph.bind.binding import Binding
from kvpass.graph.bind.capture import capture_obstacle, makes_cache
from kvpass.graph.verify import verify_bound
from kvpass.inspect.notices import warn_once
from kvpass.inspect.report import GraphReport
from kvpass.options import Options
from kvpass.regional import compile_regions
from kvpass.replay import Replayed, changed_arguments, replay_obstacle
from kvpass.rules import BOUND_RULES, Context, Event, apply_rules
from lowering import TUNE_VARIABLE as TUNE_VARIABLE
from lowering import compile_ahead as compile_ahead
from lowering import tunings as tunings

log = logging.getLogger(__name__)
# Without a usable C++ compiler.
_SLOWER = "{}; the graph runs op by op with ATen, more slowly"


def wants_replay(mode: str | None, compiler: str, examples: Sequence[Any]) -> bool:
    """Whether decode steps are to be replayed: by CUDA graphs if the mode asks for them, as
    torch.compile does it, and on a CPU unless a mode says otherwise."""
    by_default = mode is None and compiler == "inductor" and not _on_gpu(examples)
    return wants_cuda_graphs(mode) or by_default


def _on_gpu(examples: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in examples)


@dataclass(frozen=True)
class InnerCompiler:
    """Compiles the inner graph of one call of the backend.

    Attributes:
        binding: how arguments and results of Dynamo's graph map to the inner graph's.
        mode: Inductor's.
        options: what the user asks for.
        report: gets what is found and done.
    """

    binding: Binding
    mode: str | None
    options: Options
    report: GraphReport

    def compile(self, module: GraphModule) -> Callable[..., Any]:
        """The bound graph as a callable. The kernels of its ops are compiled while Inductor
        compiles the rest; only if one cannot be compiled, all is done again with what computes its
        op then."""
        report, events = self.report, list(self.report.events)
        while True:
            with report.timed("lower"):
                lowered = self._lower(module, events)
            self._check_capture()
            with report.timed("inner compile"):
                inner, modules = self.compile_lowered(lowered)
            with report.timed("lower"):
                if not lowering.failed_kernels():
                    break
        if problem := lowering.compiler_problem(report.choices):
            warn_once(_SLOWER.format(problem), report)
        with report.timed("lower"):
            return self._replayed(inner, lowered, modules)

    def compile_lowered(
        self, module: GraphModule
    ) -> tuple[Callable[..., Any], list[CompiledModule]]:
        """Inductor's callable and the modules of its code; where its C++ cannot be compiled the
        graph is run op by op."""
        report, modules = self.report, list[CompiledModule]()
        report.inner = self.options.inner
        if report.inner == "eager":
            return module, modules
        try:
            capture = report.capture_obstacle is None
            tag, direct = lowering.cache_tag(), lowering.direct_ops()
            with inductor(self.mode, tag, capture, direct, modules) as compile_one:
                compiled = compile_regions(module, list(self.binding.examples), compile_one)
            # Kernels are there from here on.
            callee, report.regions = compiled
            return callee, modules
        except Exception as error:
            problem = cpp_problem(error)
            if problem is None:
                raise
            log.debug("Inductor's error", exc_info=error)
            report.inner = "eager"
            warn_once(_SLOWER.format(problem), report)
            return module, modules

    def _lower(self, module: GraphModule, events: list[Event]) -> GraphModule:
        """A copy of the graph that calls kernels, which begin to be compiled. ``events`` are those
        of the rules before."""
        lowered, report = copy_module(module), self.report
        bound = Context(
            lowered.graph,
            Sites(),
            self.options.planner,
            replayed=self._wants_replay and capture_obstacle(self.binding, ()) is None,
            served_by=lowering.served_by,
        )
        report.events = events + apply_rules(bound, BOUND_RULES)
        report.choices = lowering.lower(lowered.graph)
        report.kernels = lowering.generated_files
        verify_bound(lowered.graph)
        lowered.recompile()
        report.bound = copy_module(lowered)
        return lowered

    @property
    def _wants_replay(self) -> bool:
        return wants_replay(self.mode, self.options.inner, self.binding.examples)

    def _check_capture(self) -> None:
        """Whether CUDA graphs may replay the graph; warns if the mode asks for them in vain."""
        binding, report = self.binding, self.report
        waiting = [choice.op for choice in report.choices if choice.waits]
        report.capture_obstacle = reason = capture_obstacle(binding, waiting)
        # A prompt is compiled for its own length: nobody expects to replay it.
        wanted = _on_gpu(binding.examples) and wants_cuda_graphs(self.mode)
        if wanted and not makes_cache(binding) and reason is not None:
            message = f"mode={self.mode!r}: no CUDA graph replays this step, for {reason}"
            warn_once(message, report)

    def _replayed(
        self, inner: Callable[..., Any], module: GraphModule, modules: Sequence[CompiledModule]
    ) -> Callable[..., Any]:
        """On a CPU: what makes the calls of a step again, if nothing stands against it."""
        binding, report = self.binding, self.report
        wanted = report.inner == "inductor" and self._wants_replay
        if not wanted or _on_gpu(binding.examples) or makes_cache(binding):
            return inner
        reason = report.capture_obstacle
        reason = reason or replay_obstacle(module.graph, binding.examples, binding.state)
        if reason is None and len(modules) != report.regions[1]:
            reason = "not all of its code is known"
        if reason is not None:
            self._tell_obstacle(reason)
            return inner
        changed = changed_arguments(module.graph)
        return Replayed(inner, modules, changed, lowering.repeat, self._tell_obstacle)

    def _tell_obstacle(self, reason: str) -> None:
        self.report.replay_obstacle = reason
        if self.mode is not None:
            warn_once(f"mode={self.mode!r}: no step is replayed, for {reason}", self.report)


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
