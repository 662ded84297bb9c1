"""``kvpass kernels``: a layer's kernels as a GPU runs them. Imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvpass.cli.options import POSITIVE, TARGETS

if TYPE_CHECKING:
    from kvpass.plan import LayerPlan

# The kernels of a decode step.
_STEP = ("append_both", "append_step", "advance_ends", "attention_split", "attention_merge")
_ROW = "{:16}" + 6 * "{:>10}" + "  {}"
_PLAN = "instead of a recipe, e.g. int2.channel32/window=0,pack_every=128."


@click.command(
    short_help="inspect the GPU kernels",
    epilog="Example: kvpass kernels --recipe kivi-2bit --target sm_90 --model --tokens 131072",
)
@click.option("--recipe", metavar="NAME", help="By default kivi-4bit.")
@click.option("--k", metavar="PLAN", help=f"Plan of the keys, {_PLAN}")
@click.option("--v", metavar="PLAN", help="Plan of the values.")
@click.option("--target", default="sm_90", type=click.Choice(list(TARGETS)))
@click.option("--head-dim", type=POSITIVE, default=128)
@click.option("--value-dim", type=POSITIVE, help="If it is not --head-dim.")
@click.option("--heads-per-group", type=POSITIVE, default=4, help="Query heads of one KV head.")
@click.option("--static", type=POSITIVE, help="Of a static cache with room for so many tokens.")
@click.option("--model", is_flag=True, help="Predict the time of a decode step of one layer.")
@click.option("--tokens", type=POSITIVE, default=32_768, help="For --model.")
@click.option("--batch", type=POSITIVE, default=1, help="For --model.")
def kernels(
    recipe: str | None,
    k: str | None,
    v: str | None,
    target: str,
    head_dim: int,
    value_dim: int | None,
    heads_per_group: int,
    static: int | None,
    model: bool,
    tokens: int,
    batch: int,
) -> None:
    """Compiles the kernels of one attention layer for a GPU, which need not be present, and prints
    what they need. inst/el: thread instructions of attention's main loop per element of keys and
    values; budget: below it, memory is the limit.
    """
    from kvpass.format.channels import ChannelRotation
    from lowering.triton.inspection import inspect_launch
    from lowering.triton.layer import layer_launches

    dims = head_dim, value_dim or head_dim
    plan = _layer_plan(recipe, k, v, *dims)
    stored = (plan.keys, plan.values)
    if static is not None:
        stored = (plan.keys.static(static), plan.values.static(static))
    launches = layer_launches(
        *map(str, stored), key_dim=dims[0], value_dim=dims[1], heads_per_group=heads_per_group,
        keys_rotated=isinstance(plan.key_basis, ChannelRotation),
    )  # fmt: skip
    # Keys and values of one plan share their kernels.
    distinct = {x.kernel: x for x in launches}.values()
    reports = [(x.layouts, inspect_launch(x, TARGETS[target])) for x in distinct]
    formats = "keys {}, values {}".format(*(tensor_plan.summary() for tensor_plan in stored))
    print(f"{formats}, head_dim {dims[0]}/{dims[1]}, {heads_per_group} query heads per KV head, "
          f"{target}")  # fmt: skip
    _print_kernels(reports, TARGETS[target])
    if model:
        steps = sum(x.kernel.__name__ in _STEP for x in launches)
        _print_model(reports, steps, TARGETS[target], tokens, batch)


def _print_kernels(reports: Sequence[tuple[Any, Any]], capability: int) -> None:
    from lowering.triton.inspection import instruction_budget
    from lowering.triton.layer import KV_HEADS

    print(
        _ROW.format("kernel", "registers", "shared", "spills", "mma", "inst/el", "budget", "file")
    )
    for layouts, r in reports:
        spills = f"{r.stack + r.local} B" if r.spills else "none"
        counted = ("-", "-")
        if r.per_element is not None and layouts is not None:
            keys, values = layouts
            budget = instruction_budget(keys, values, capability, KV_HEADS)
            counted = (f"{r.per_element:.2f}", f"{budget:.2f}")
        mma = r.tensor_core_instructions
        print(_ROW.format(r.name, r.registers, r.shared, spills, mma, *counted, r.path))


def _print_model(
    reports: Sequence[tuple[Any, Any]], steps: int, capability: int, tokens: int, batch: int
) -> None:
    """What is predicted of a step of so many launches, for each format of a layer as if all tokens
    were stored in it."""
    from lowering.triton.layer import KV_HEADS
    from lowering.triton.roofline import predict

    print(f"\npredicted, not measured: a step of {batch} x {tokens} tokens, "
          f"{KV_HEADS} KV heads, {steps} launches")  # fmt: skip
    row = "{:44}" + 5 * "{:>10}"
    print(row.format("us of a layer", "memory", "issue", "launches", "all", "dense"))
    for layouts, r in reports:
        if layouts is None or r.per_element is None:
            continue
        p = predict(
            layouts, r.per_element, steps, capability, tokens=batch * tokens, kv_heads=KV_HEADS
        )
        seconds = (p.memory, p.issue, p.launches, p.total, p.dense)
        print(row.format("{}, {}".format(*layouts), *(f"{1e6 * x:.1f}" for x in seconds)))


def _layer_plan(
    recipe: str | None, k: str | None, v: str | None, key_dim: int, value_dim: int
) -> LayerPlan:
    """The plan of ``--recipe``, or of ``--k`` and ``--v``, which fits the head dimensions."""
    import torch

    from kvpass.bench.plans import layer_plan
    from kvpass.errors import OptionError
    from kvpass.format.parse import parse_plan
    from kvpass.plan import LayerPlan
    from kvpass.recipes import DEFAULT
    from lowering.triton.layer import KV_HEADS

    if k is None and v is None:
        # What is calibrated, with random tokens, changes no instruction.
        x, y = (torch.randn(1, KV_HEADS, 256, dim) for dim in (key_dim, value_dim))
        return layer_plan(recipe or DEFAULT, x, y)
    if recipe is not None or k is None or v is None:
        raise OptionError("Give either --recipe, or both --k and --v.")
    plan = LayerPlan(parse_plan(k), parse_plan(v))
    plan.check("*", key_dim, value_dim)
    return plan
