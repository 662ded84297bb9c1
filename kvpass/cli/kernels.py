"""``kvpass kernels``: a layer's kernels as a GPU runs them. Imports torch only when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvpass.cli.options import TARGETS, positive

if TYPE_CHECKING:
    from kvpass.plan import LayerPlan

# The kernels of a decode step.
_STEP = ("append_both", "append_step", "advance_ends", "attention_split", "attention_merge")
_ROW = "{:16}" + 6 * "{:>10}" + "  {}"


def add_kernels(commands: Any) -> None:
    """Adds ``kernels`` to the sub-parsers of a command line."""
    command = commands.add_parser(
        "kernels",
        help="inspect the GPU kernels",
        description="Compiles the kernels of one attention layer for a GPU, which need not be "
        "present, and prints what they need. inst/el: thread instructions of attention's main "
        "loop per element of keys and values; budget: below it, memory is the limit.",
    )
    add = command.add_argument
    add("--recipe", help="default: kivi-4bit", metavar="NAME")
    plan = "instead of a recipe, e.g. int2.channel32/window=0,pack_every=128"
    add("--k", metavar="PLAN", help=f"plan of the keys, {plan}")
    add("--v", metavar="PLAN", help="plan of the values")
    add("--target", default="sm_90", choices=TARGETS, help="default: sm_90")
    add("--head-dim", type=positive, default=128, metavar="D", help="default: 128")
    add("--value-dim", type=positive, metavar="D", help="default: as --head-dim")
    group = "query heads that share a KV head (default: 4)"
    add("--heads-per-group", type=positive, default=4, metavar="N", help=group)
    add("--static", type=positive, metavar="TOKENS", help="of a static cache with room for so many")
    add("--model", action="store_true", help="predict the time of a decode step of one layer")
    add("--tokens", type=positive, default=32_768, metavar="N", help="of --model (default: 32768)")
    add("--batch", type=positive, default=1, metavar="B", help="of --model (default: 1)")
    command.set_defaults(run=run_kernels)


def run_kernels(options: argparse.Namespace) -> int:
    """``kvpass kernels``."""
    from lowering.triton.inspection import inspect_launch, instruction_budget
    from lowering.triton.layer import KV_HEADS, layer_launches

    key_dim, value_dim = options.head_dim, options.value_dim or options.head_dim
    heads, capability = options.heads_per_group, TARGETS[options.target]
    plan = _layer_plan(options, key_dim, value_dim)
    stored = (plan.keys, plan.values)
    if options.static is not None:
        stored = (plan.keys.static(options.static), plan.values.static(options.static))
    k, v = map(str, stored)
    launches = layer_launches(k, v, key_dim=key_dim, value_dim=value_dim, heads_per_group=heads)
    # Keys and values of one plan share their kernels.
    kernels = {x.kernel: x for x in launches}.values()
    reports = [(x.layouts, inspect_launch(x, capability)) for x in kernels]
    formats = "keys {}, values {}".format(*(tensor_plan.summary() for tensor_plan in stored))
    print(f"{formats}, head_dim {key_dim}/{value_dim}, {heads} query heads per KV head, "
          f"{options.target}")  # fmt: skip
    print(
        _ROW.format("kernel", "registers", "shared", "spills", "mma", "inst/el", "budget", "file")
    )
    for layouts, r in reports:
        spills = f"{r.stack + r.local} B" if r.spills else "none"
        counted = ("-", "-")
        if r.per_element is not None and layouts is not None:
            budget = instruction_budget(*layouts, capability, KV_HEADS)
            counted = (f"{r.per_element:.2f}", f"{budget:.2f}")
        mma = r.tensor_core_instructions
        print(_ROW.format(r.name, r.registers, r.shared, spills, mma, *counted, r.path))
    if options.model:
        _print_model(options, reports, sum(x.kernel.__name__ in _STEP for x in launches))
    return 0


def _print_model(options: argparse.Namespace, reports: Sequence[Any], steps: int) -> None:
    """What is predicted of a step of so many launches, for each format of a layer as if all tokens
    were stored in it."""
    from lowering.triton.layer import KV_HEADS
    from lowering.triton.roofline import predict

    print(f"\npredicted, not measured: a step of {options.batch} x {options.tokens} tokens, "
          f"{KV_HEADS} KV heads, {steps} launches")  # fmt: skip
    row = "{:44}" + 5 * "{:>10}"
    print(row.format("us of a layer", "memory", "issue", "launches", "all", "dense"))
    for layouts, r in reports:
        if layouts is None or r.per_element is None:
            continue
        tokens = options.batch * options.tokens
        of = TARGETS[options.target]
        p = predict(layouts, r.per_element, steps, of, tokens=tokens, kv_heads=KV_HEADS)
        seconds = (p.memory, p.issue, p.launches, p.total, p.dense)
        print(row.format("{}, {}".format(*layouts), *(f"{1e6 * x:.1f}" for x in seconds)))


def _layer_plan(options: argparse.Namespace, key_dim: int, value_dim: int) -> LayerPlan:
    """The plan of ``--recipe``, or of ``--k`` and ``--v``, which fits the head dimensions."""
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
