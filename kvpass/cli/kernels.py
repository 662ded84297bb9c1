"""``kvpass kernels``: what a layer's kernels become on a GPU. Imports torch only when it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpass.plan import LayerPlan
    from lowering.triton.inspection import KernelReport


def add_kernels(commands: Any) -> None:
    """Adds ``kernels`` to the sub-parsers of a command line."""
    description = (
        "Compiles the kernels of one attention layer for a GPU, which need not be present, and "
        "prints what they need. inst/el: thread instructions of attention's main loop per element "
        "of keys and values; budget: below it, memory is the limit."
    )
    command = commands.add_parser(
        "kernels", help="inspect the GPU kernels", description=description
    )
    command.add_argument("--recipe", help="default: kivi-4bit", metavar="NAME")
    plan = "instead of a recipe, e.g. int2.channel32/window=0,pack_every=128"
    command.add_argument("--k", metavar="PLAN", help=f"plan of the keys, {plan}")
    command.add_argument("--v", metavar="PLAN", help="plan of the values")
    command.add_argument("--target", default="sm_90", help="sm_80 or sm_90 (default)")
    command.add_argument("--head-dim", type=int, default=128, metavar="D", help="default: 128")
    command.add_argument("--value-dim", type=int, metavar="D", help="default: as --head-dim")
    command.add_argument(
        "--heads-per-group", type=int, default=4, metavar="N",
        help="query heads that share a KV head (default: 4)",
    )  # fmt: skip
    command.add_argument(
        "--static", type=int, metavar="TOKENS", help="of a static cache with room for so many"
    )
    command.set_defaults(run=run_kernels)


def run_kernels(options: argparse.Namespace) -> int:
    """``kvpass kernels``."""
    from lowering.triton.inspection import inspect_launch, instruction_budget
    from lowering.triton.layer import KV_HEADS, layer_launches
    from lowering.triton.layouts import layout_of

    capability = _capability(options.target)
    key_dim = _positive("head-dim", options.head_dim)
    value_dim = _positive("value-dim", key_dim if options.value_dim is None else options.value_dim)
    heads = _positive("heads-per-group", options.heads_per_group)
    plan = _layer_plan(options, key_dim, value_dim)
    stored = (plan.keys, plan.values)
    if options.static is not None:
        room = _positive("static", options.static)
        stored = (plan.keys.static(room), plan.values.static(room))
    k, v = map(str, stored)
    launches = layer_launches(k, v, key_dim=key_dim, value_dim=value_dim, heads_per_group=heads)
    # Keys and values of one plan share their kernels.
    distinct = {x.kernel: x for x in launches}.values()
    reports = [inspect_launch(x, capability) for x in distinct]
    layouts = layout_of(k, key_dim), layout_of(v, value_dim)
    budget = instruction_budget(*layouts, capability, KV_HEADS)
    formats = "keys {}, values {}".format(*(tensor_plan.summary() for tensor_plan in stored))
    print(f"{formats}, head_dim {key_dim}/{value_dim}, {heads} query heads per KV head, "
          f"{options.target}")  # fmt: skip
    print(_row("kernel", "registers", "shared", "spills", "mma", "inst/el", "budget", "file"))
    for report in reports:
        print(_report_row(report, budget))
    return 0


def _report_row(report: KernelReport, budget: float) -> str:
    counted = report.per_element is not None
    return _row(
        report.name,
        report.registers,
        report.shared,
        f"{report.stack + report.local} B" if report.spills else "none",
        report.tensor_core_instructions,
        f"{report.per_element:.2f}" if counted else "-",
        f"{budget:.2f}" if counted else "-",
        report.path,
    )


def _row(name: object, *columns: object) -> str:
    *numbers, file = columns
    return f"{name!s:16}" + "".join(f"{x!s:>10}" for x in numbers) + f"  {file}"


def _capability(target: str) -> int:
    from kvpass.errors import OptionError, unknown
    from lowering.triton.inspection import CAPABILITIES

    targets = {f"sm_{capability}": capability for capability in CAPABILITIES}
    if target not in targets:
        raise OptionError(unknown("target", target, targets))
    return targets[target]


def _positive(name: str, value: int) -> int:
    from kvpass.errors import OptionError

    if value < 1:
        raise OptionError(f"--{name} {value} is not supported; allowed: a positive number.")
    return value


def _layer_plan(options: argparse.Namespace, key_dim: int, value_dim: int) -> LayerPlan:
    """What ``--recipe``, or ``--k`` and ``--v``, say, checked against the head dimensions."""
    import torch

    from kvpass.bench.plans import layer_plan
    from kvpass.errors import OptionError
    from kvpass.format.parse import parse_plan
    from kvpass.plan import LayerPlan
    from kvpass.recipes import DEFAULT
    from lowering.triton.layer import KV_HEADS

    if options.k is None and options.v is None:
        # What is calibrated, with random tokens, changes no instruction.
        x, y = (torch.randn(1, KV_HEADS, 256, dim) for dim in (key_dim, value_dim))
        return layer_plan(options.recipe or DEFAULT, x, y)
    if options.recipe is not None or options.k is None or options.v is None:
        raise OptionError("Give either --recipe, or both --k and --v.")
    plan = LayerPlan(parse_plan(options.k), parse_plan(options.v))
    plan.check("*", key_dim, value_dim)
    return plan
