"""``kvpass::append_attention`` in Triton: one append to keys and values, the splits of attention
over what is then stored, and their merge, which moves the segment ends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.append_attention import StepArguments, own_tensors
from kvpass.ops.attention import AttentionArguments, with_signature
from lowering.codegen import load_kernels
from lowering.triton import append, attention
from lowering.triton.launch import launch
from lowering.triton.layouts import layout_of, stored
from triton_templates import next_power_of_2


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append_attention``, or None."""
    step, a = StepArguments.split(*args, **kwargs)
    keys, values = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    rotation = step.cos_sin, step.rope
    return (
        append.unsupported_reason(keys, step.new_keys, a.k_plan, *rotation, step.k_clip)
        or append.unsupported_reason(values, step.new_values, a.v_plan, clip=step.v_clip)
        or attention.unsupported_reason(*a)
    )


@with_signature(StepArguments, AttentionArguments)
def append_attention(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.append_attention.append_attention`, for arguments that are supported."""
    step, a = StepArguments.split(*args, **kwargs)
    batch, heads, new, _ = step.new_keys.shape
    plans = [stored(parse_plan(plan)) for plan in (a.k_plan, a.v_plan)]
    states = (own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan))
    k, v = (
        layout_of(str(p), int(x.shape[3]))
        for p, x in zip(plans, (step.new_keys, step.new_values), strict=True)
    )
    rotation = step.cos_sin, step.rope
    of_keys = append.appending(states[0], step.new_keys, plans[0], k, *rotation, step.k_clip)
    of_values = append.appending(states[1], step.new_values, plans[1], v, clip=step.v_clip)
    variables = {
        "k_rope": of_keys.variables["rope"],
        "k_clip_each": of_keys.variables["clip_each"],
        "v_clip_each": of_values.variables["clip_each"],
    }
    kernels = load_kernels("append_attention", k=k, v=v, **variables)
    launch(
        kernels.append_both, (batch * heads, of_keys.parts + of_values.parts),
        *of_keys.arguments, of_keys.parts, *of_values.arguments,
        KV_HEADS=heads, NEW=new, NEW_PADDED=next_power_of_2(new),
        **_prefixed("K", of_keys.constants), **_prefixed("V", of_values.constants),
    )  # fmt: skip
    ages = _prefixed("K", append.ages(plans[0])) | _prefixed("V", append.ages(plans[1]))
    return attention.attend(attention.best_sizes(a), *a, ages=ages)


def _prefixed(prefix: str, constants: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in constants.items()}
