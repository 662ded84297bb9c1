"""``kvpass::append`` in Triton: the append of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.format.rope import Rope
from kvpass.format.tensor_plan import TensorPlan
from lowering.codegen import load_kernels
from lowering.support import dense, row_stride
from lowering.triton.heuristics import encode_tokens
from lowering.triton.launch import launch
from lowering.triton.layouts import (
    NewTokens,
    clipping,
    heads_together,
    layout_of,
    rooms,
    stored,
    unsupported_device,
    unsupported_dtype,
    unsupported_encoding,
    unsupported_new,
    unsupported_state,
)
from triton_templates import Layout, next_power_of_2


def unsupported_reason(
    state: Sequence[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> str | None:
    """Why the kernels decline these arguments of ``kvpass::append``, or None."""
    if reason := unsupported_new(new.shape[2]):
        return reason
    if new.shape[2] > MAX_STEP:
        return f"{new.shape[2]} new tokens are a prefill; the kernel appends {MAX_STEP} at most"
    plan = str(stored(parse_plan(plan)))
    if cos_sin is not None and (reason := unsupported_dtype(cos_sin, "a row of cosines and sines")):
        return reason
    return (
        unsupported_device(new)
        or unsupported_encoding(plan, int(new.shape[3]), clip)
        or unsupported_state(state, plan)
    )


def append(
    state: list[Tensor],
    new: Tensor,
    plan: str,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
) -> None:
    """As `kvpass.ops.append.append`, for arguments that are supported."""
    p = stored(parse_plan(plan))
    append_as(state, new, p, layout_of(str(p), int(new.shape[3])), cos_sin, rope, clip)


def append_as(
    tensors: Sequence[Tensor],
    new: Tensor,
    p: TensorPlan,
    layout: Layout,
    cos_sin: Tensor | None,
    rope: str | None,
    clip: Tensor | None = None,
) -> None:
    """`append` to the ``tensors`` of this layout, the last of which are the segments' ends."""
    batch, heads, steps, _ = new.shape
    x = appending(tensors, new, p, layout, cos_sin, rope, clip)
    count = NewTokens.of(steps)
    kernels = load_kernels("append", layout=layout, **x.variables, new_varies=count.varies)
    launch(
        kernels.append_step, (batch * (heads // x.constants["HEADS"]), x.parts), *x.arguments,
        KV_HEADS=heads, NEW=steps, NEW_PADDED=next_power_of_2(count.most), **x.constants,
    )  # fmt: skip
    launch(kernels.advance_ends, (batch,), tensors[-1], NEW=steps, **ages(p))


class Appending(NamedTuple):
    """What the kernels need to append to one cache tensor.

    Attributes:
        arguments: by position.
        constants: by name.
        variables: of the template.
        parts: programs that share what can be due of a head.
    """

    arguments: list[Any]
    constants: dict[str, Any]
    variables: dict[str, Any]
    parts: int


def ages(p: TensorPlan) -> dict[str, Any]:
    """When tokens are packed, as constants of kernels."""
    return {"WINDOW": p.retention.window, "PACK_EVERY": p.retention.pack_every}


def appending(
    tensors: Sequence[Tensor],
    new: Tensor,
    p: TensorPlan,
    layout: Layout,
    cos_sin: Tensor | None = None,
    rope: str | None = None,
    clip: Tensor | None = None,
    basis: Tensor | None = None,
) -> Appending:
    """See `append_as`; ``basis``: see `kvpass.ops.append_attention.StepArguments`."""
    new, room, heads = dense(new), rooms(tensors, layout), new.shape[1]
    factors, clip_each = clipping(p, clip)
    arguments, rotation = [*tensors, new, *room, *new.stride()[:3]], None
    if cos_sin is not None and rope is not None:
        r, cos_sin = Rope.parse(rope), cos_sin.contiguous()
        rotation = r.start, r.stop, r.kind == "neighbours"
        arguments += [cos_sin, row_stride(cos_sin), cos_sin.stride(1)]
    size = None
    if basis is not None:
        basis, size = basis.contiguous(), basis.shape[-1]
        arguments += [basis, basis.stride(1) if basis.shape[1] != 1 else 0]
    tokens, parts, together = encode_tokens(layout), 1, heads_together(layout, heads)
    if not layout.cross_head:
        # The ring bounds how many tokens can be exact, and so how many can be due.
        most = room[-1] if layout.grows else max(1, p.retention.due(layout.ring))
        parts = -(-most // tokens)
    constants = {
        "HEADS": together, "HEADS_PADDED": next_power_of_2(together), **ages(p),
        "TOKENS": tokens, "CLIPPED": p.codec.clip != 1,
    }  # fmt: skip
    variables = {"rope": rotation, "basis": size, "clip_each": clip_each}
    return Appending([*arguments, factors], constants, variables, parts)
