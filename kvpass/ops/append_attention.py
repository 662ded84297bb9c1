"""``kvpass::append_attention``: a decode step of one layer, whose tokens join keys and values and
are attended with them. One op, so that one kernel appends to both and lengths move once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kvpass.format.parse import parse_plan
from kvpass.ops.append import append
from kvpass.ops.attention import (
    ATTENTION_ARGUMENTS,
    AttentionArguments,
    attention,
    attention_fake,
)
from kvpass.ops.basis import rotate
from kvpass.ops.chunks import append_chunks, attention_chunks
from kvpass.ops.cos_sin import rotated
from kvpass.ops.library import define

APPEND_ATTENTION_ARGUMENTS = (
    "(Tensor new_keys, Tensor new_values, Tensor? cos_sin, str? rope, Tensor? k_clip, "
    "Tensor? v_clip, Tensor? basis, "
    + ATTENTION_ARGUMENTS[1:]
    .replace("Tensor[] keys", "Tensor(a!)[] keys")
    .replace("Tensor[] values", "Tensor(b!)[] values")
)


class StepArguments(NamedTuple):
    """The first arguments of ``kvpass::append_attention``; `AttentionArguments` come behind them.

    Attributes:
        new_keys, new_values: ``[B, H, n, D]``, see `kvpass.ops.append.append`.
        cos_sin, rope: of ``new_keys``, see there.
        k_clip, v_clip: of keys and of values, see there.
        basis: float32 ``[1, 1 or H, 1, blocks, D / blocks, D / blocks]``: a rotation of the
            channels of new keys, before they are stored, and of the query, see
            `kvpass.ops.basis.rotate`; None if both come in the basis of the keys' storage.
    """

    new_keys: Tensor
    new_values: Tensor
    cos_sin: Tensor | None
    rope: str | None
    k_clip: Tensor | None
    v_clip: Tensor | None
    basis: Tensor | None

    @classmethod
    def split(cls, *args: Any, **kwargs: Any) -> tuple[StepArguments, AttentionArguments]:
        """The two groups of arguments."""
        count = len(cls._fields)
        return cls(*args[:count]), AttentionArguments(*args[count:], **kwargs)


def append_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::append_attention``: two appends, then attention.

    Args:
        args: see `StepArguments` and `AttentionArguments`.

    Returns:
        As `kvpass.ops.attention.attention`.
    """
    return _one_after_the_other(append, attention, *args, **kwargs)


def append_attention_chunks(*args: Any, **kwargs: Any) -> Tensor:
    """Reference of ``kvpass::append_attention_chunks``, see `append_attention`."""
    return _one_after_the_other(append_chunks, attention_chunks, *args, **kwargs)


def _one_after_the_other(
    append: Callable[..., None], attention: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    step, a = StepArguments.split(*args, **kwargs)
    keys, values = own_tensors(a.keys, a.k_plan), own_tensors(a.values, a.v_plan)
    new, cos_sin, rope = step.new_keys, step.cos_sin, step.rope
    if step.basis is not None:
        new, cos_sin, rope = rotate(rotated(new, cos_sin, rope), step.basis), None, None
        a = a._replace(q=rotate(a.q, step.basis))
    append(keys, new, a.k_plan, cos_sin, rope, step.k_clip)
    append(values, step.new_values, a.v_plan, clip=step.v_clip)
    return attention(*a)


def own_tensors(state: list[Tensor], plan: str) -> list[Tensor]:
    """The tensors of a state but for what all layers share."""
    return state[: len(parse_plan(plan).layout.own)]


def append_attention_fake(*args: Any, **kwargs: Any) -> Tensor:
    """Shape of `append_attention`."""
    return attention_fake(*StepArguments.split(*args, **kwargs)[1])


define("append_attention" + APPEND_ATTENTION_ARGUMENTS, append_attention, append_attention_fake)
define(
    "append_attention_chunks" + APPEND_ATTENTION_ARGUMENTS,
    append_attention_chunks,
    append_attention_fake,
)
