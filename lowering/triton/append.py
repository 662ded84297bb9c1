"""``kvpass::append`` in Triton: the append of a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.format.retention import MAX_STEP
from kvpass.format.rope import Rope
from kvpass.format.state import State
from lowering.codegen import load_kernels
from lowering.support import dense, row_stride
from lowering.triton.heuristics import encode_tokens
from lowering.triton.launch import launch
from lowering.triton.layouts import (
    capacity_tiles,
    clip_argument,
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
    layout = layout_of(str(p), int(new.shape[3]))
    if layout.identity:
        append_exact(state, new, layout, cos_sin, rope)
        return
    batch, heads, steps, _ = new.shape
    s = State.of(state, plan)
    ages: dict[str, Any] = {
        "NEW": steps,
        "WINDOW": p.retention.window,
        "PACK_EVERY": p.retention.pack_every,
    }
    factors = clip_argument(p, clip)
    each = {"clip_each": True} if isinstance(factors, Tensor) else {}
    kernels, arguments = _step(state, rooms(s, layout), new, layout, cos_sin, rope, **each)
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
        most = s.window.shape[2] if layout.grows else max(1, p.retention.due(layout.ring))
        programs = -(-most // tokens)
        launch(
            kernels.append_step, (batch * heads, programs), *arguments, factors,
            KV_HEADS=heads, NEW_PADDED=padded, TOKENS=tokens, CLIPPED=p.codec.clip != 1, **ages,
        )  # fmt: skip
    launch(kernels.advance_ends, (batch,), s.segment_ends, **ages)


def append_exact(
    tensors: Sequence[Tensor],
    new: Tensor,
    layout: Layout,
    cos_sin: Tensor | None,
    rope: str | None,
) -> None:
    """`append` where all tokens are stored as they are, in the ``tensors`` of this layout."""
    batch, heads, steps, _ = new.shape
    room = (capacity_tiles(tensors[0]),)
    kernels, arguments = _step(tensors, room, new, layout, cos_sin, rope)
    # Nothing is ever due.
    ages: dict[str, Any] = {"NEW": steps, "WINDOW": 0, "PACK_EVERY": 1}
    launch(
        kernels.append_step, (batch * heads, 1), *arguments, 1.0,
        KV_HEADS=heads, NEW_PADDED=next_power_of_2(steps), TOKENS=1, CLIPPED=False, **ages,
    )  # fmt: skip
    launch(kernels.advance_ends, (batch,), tensors[-1], **ages)


def _step(
    tensors: Sequence[Tensor],
    rooms: tuple[int, ...],
    new: Tensor,
    layout: Layout,
    cos_sin: Tensor | None,
    rope: str | None,
    **variables: Any,
) -> tuple[ModuleType, list[Any]]:
    """The kernels, with more ``variables`` of the template, and their arguments up to the cosines
    and sines."""
    new = dense(new)
    arguments = [*tensors, new, *rooms, *new.stride()[:3]]
    if cos_sin is None or rope is None:
        return load_kernels("append", layout=layout, **variables), arguments
    r = Rope.parse(rope)
    rotated = (r.start, r.stop, r.kind == "neighbours")
    kernels = load_kernels("append", layout=layout, rope=rotated, **variables)
    cos_sin = cos_sin.contiguous()
    return kernels, [*arguments, cos_sin, row_stride(cos_sin), cos_sin.stride(1)]
