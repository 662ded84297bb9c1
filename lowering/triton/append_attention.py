"""``kvpass::append_attention`` in Triton: one append to keys and values, the splits of attention
over what is then stored, and their merge, which moves the segment ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.tensor_plan import TensorPlan
from kvpass.ops.append_attention import StepArguments, own_tensors
from kvpass.ops.attention import AttentionArguments, with_signature
from lowering.codegen import load_kernels
from lowering.support import dense, unsupported_basis
from lowering.triton import append, attention
from lowering.triton.attention import Advance
from lowering.triton.launch import launch
from lowering.triton.layouts import NewTokens, layout_of, stored
from triton_templates import Layout, next_power_of_2


def unsupported_reason(*args: Any, **kwargs: Any) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append_attention``, or None."""
    step, a = StepArguments.split(*args, **kwargs)
    keys, values = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    rotation = step.cos_sin, step.rope
    return (
        unsupported_basis(step)
        or append.unsupported_reason(keys, step.new_keys, a.k_plan, *rotation, step.k_clip)
        or append.unsupported_reason(values, step.new_values, a.v_plan, clip=step.v_clip)
        or attention.unsupported_reason(*a)
    )


@with_signature(StepArguments, AttentionArguments)
def append_attention(*args: Any, **kwargs: Any) -> Tensor:
    """As `kvpass.ops.append_attention.append_attention`, for arguments that are supported."""
    step, a = StepArguments.split(*args, **kwargs)
    plans = stored(parse_plan(a.k_plan)), stored(parse_plan(a.v_plan))
    k = layout_of(str(plans[0]), int(step.new_keys.shape[3]))
    v = layout_of(str(plans[1]), int(step.new_values.shape[3]))
    states = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    sizes, query = attention.best_sizes(a), None
    if step.basis is not None:
        query = dense(a.q), a.q.new_empty(a.q.shape)
        a = a._replace(q=query[1])
    advance = append_both(step, states, plans, (k, v), query)
    return attention.attend(sizes, *a, advance=advance)


def append_both(
    step: StepArguments,
    states: tuple[Sequence[Tensor], Sequence[Tensor]],
    plans: tuple[TensorPlan, TensorPlan],
    layouts: tuple[Layout, Layout],
    query: tuple[Tensor, Tensor] | None = None,
) -> Advance:
    """Appends to keys and values, the last of whose tensors are segment ends that stay as they are.
    ``query``: if there is a basis, one that is to be brought to it, and the contiguous tensor that
    gets the result. Returns what attention needs to see the new tokens."""
    batch, heads, new, _ = step.new_keys.shape
    of_keys = step.cos_sin, step.rope, step.k_clip, step.basis
    k = append.appending(states[0], step.new_keys, plans[0], layouts[0], *of_keys)
    v = append.appending(states[1], step.new_values, plans[1], layouts[1], clip=step.v_clip)
    count, parts = NewTokens.of(new), k.parts + v.parts
    kernels = load_kernels(
        "append_attention", k=layouts[0], v=layouts[1], k_rope=k.variables["rope"],
        k_basis=k.variables["basis"], k_clip_each=k.variables["clip_each"],
        v_clip_each=v.variables["clip_each"], new_varies=count.varies,
    )  # fmt: skip
    rotated: tuple[Any, ...] = ()
    if query is not None:
        q, out = query
        groups = q.shape[1] // heads
        rotated = (v.parts, q, *q.stride()[:3], out, groups)
        parts += groups * new
    launch(
        kernels.append_both, (batch * heads, parts),
        *k.arguments, k.parts, *v.arguments, *rotated,
        KV_HEADS=heads, NEW=new, NEW_PADDED=next_power_of_2(count.most),
        **_prefixed("K", k.constants), **_prefixed("V", v.constants),
    )  # fmt: skip
    ages = _prefixed("K", append.ages(plans[0])) | _prefixed("V", append.ages(plans[1]))
    return Advance((states[0][-1], states[1][-1]), ages)


def _prefixed(prefix: str, constants: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in constants.items()}
