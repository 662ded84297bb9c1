"""``kvpass::append`` in Triton: the append of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    clipping,
    head_constants,
    layout_of,
    rooms,
    stored,
    symbolic,
    unsupported_device,
    unsupported_dtype,
    unsupported_encoding,
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
    if symbolic(new.shape[2]):
        return "the number of new tokens is symbolic"
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
    new, room = dense(new), rooms(tensors, layout)
    factors, variables = clipping(p, clip)
    arguments = [*tensors, new, *room, *new.stride()[:3]]
    if cos_sin is not None and rope is not None:
        r, cos_sin = Rope.parse(rope), cos_sin.contiguous()
        variables |= {"rope": (r.start, r.stop, r.kind == "neighbours")}
        arguments += [cos_sin, row_stride(cos_sin), cos_sin.stride(1)]
    kernels = load_kernels("append", layout=layout, **variables)
    window, every = p.retention.window, p.retention.pack_every
    ages: dict[str, Any] = {"NEW": steps, "WINDOW": window, "PACK_EVERY": every}
    padded = next_power_of_2(steps)
    if layout.cross_head:
        together = head_constants(layout, heads)
        launch(
            kernels.append_step, (batch * (heads // together["HEADS"]),), *arguments,
            **together, NEW_PADDED=padded, **ages,
        )  # fmt: skip
    else:
        tokens = encode_tokens(layout)
        # The ring bounds how many tokens can be exact, and so how many can be due.
        most = room[-1] if layout.grows else max(1, p.retention.due(layout.ring))
        launch(
            kernels.append_step, (batch * heads, -(-most // tokens)), *arguments, factors,
            KV_HEADS=heads, NEW_PADDED=padded, TOKENS=tokens, CLIPPED=p.codec.clip != 1, **ages,
        )  # fmt: skip
    launch(kernels.advance_ends, (batch,), tensors[-1], **ages)
