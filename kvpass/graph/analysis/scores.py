"""Folds what stands between ``q @ k^T`` and the softmax into what attention over packed keys takes.

That is ``softmax([softcap * tanh(scale * q @ k^T / softcap) + mask, sinks])``. Every function here
states the identity by which it moves a step into one of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import Node

from kvpass._torch_sizes import same_size
from kvpass.graph.pattern import Captures, Miss, Step
from kvpass.graph.spellings import argument, op_name

# A number this low does not change when a score is added to it, in float32 and in bfloat16.
ABSORBING = -1e30


@dataclass(frozen=True)
class MaskStep:
    """One step of making a mask, from the first, which stands for zeros if it needs a mask.

    Attributes:
        kind: ``add`` a tensor; ``hide`` where it is True, or ``show`` only there, by ``fill``;
            ``mul``: times ``fill``; ``floor``: at least ``fill``.
        by: that tensor, of up to four dimensions.
        fill: the number.
        joined: batch and heads are one dimension of ``by``.
        dtype: in which the scores were at this step.
    """

    kind: Literal["add", "hide", "show", "mul", "floor"]
    by: Node | None = None
    fill: float = 0.0
    joined: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Scores:
    """The scores after some steps: ``softcap * tanh(scale * q @ k^T) + mask`` with a ``softcap``,
    else ``scale * q @ k^T + mask``."""

    heads: int
    scale: float = 1.0
    softcap: float = 0.0
    mask: list[MaskStep] = field(default_factory=list)
    sinks: Node | None = None

    @property
    def plain_mask(self) -> Node | None:
        """The only tensor added, if it has the shape of a mask as it is."""
        if len(self.mask) != 1 or self.mask[0].kind != "add" or self.mask[0].joined:
            return None
        by = self.mask[0].by
        return by if by is not None and by.meta["example_value"].dim() == 4 else None

    # (s + mask) * k = s * k + mask * k;  (c * tanh(s)) * k = (c * k) * tanh(s)
    def mul(self, factor: float) -> str | None:
        """A factor of the scores."""
        if not (math.isfinite(factor) and factor > 0):
            return f"scores are multiplied by {factor:g}"
        if self.mask:
            fills = [s.fill for s in self.mask if s.kind in ("hide", "show", "floor")]
            if any(fill * factor > ABSORBING for fill in fills):
                return f"hidden scores are multiplied by {factor:g}"
            self.mask.append(MaskStep("mul", fill=factor))
        if self.softcap:
            self.softcap *= factor
        else:
            self.scale *= factor
        return None

    # tanh(s) = 1 * tanh(s)
    def tanh(self) -> str | None:
        """Soft-capping, up to its factor."""
        if self.softcap or self.mask:
            return "tanh of scores that are masked or capped already"
        self.softcap = 1.0
        return None

    # (s + mask) + x = s + (mask + x)
    def add(self, by: Node, at: Node) -> str | None:
        """A mask or bias, added at ``at``; bool for SDPA's."""
        return self._broadcast("add", by, at)

    # where(hidden, low, s + mask) = s + where(hidden, low, mask), since low absorbs s
    def hide(self, step: Step, kind: Literal["hide", "show"]) -> str | None:
        """Some scores become a low number."""
        fill = number(step.found["fill"])
        assert fill is not None
        if not fill <= ABSORBING:
            return f"hidden scores become {fill:g}, which is not low enough to absorb a score"
        return self._broadcast(kind, step.found["by"], step.node, fill)

    # max(s + mask, low) = s + max(mask, low), since low absorbs s; max(s, low) = s
    def floor(self, step: Step) -> str | None:
        """No score is below a low number."""
        fill = number(step.found["fill"])
        if fill is None or not fill <= ABSORBING:
            return f"scores are at least {fill}, which is not low enough to absorb a score"
        if self.mask:
            self.mask.append(MaskStep("floor", fill=fill))
        return None

    def sink(self, step: Step) -> str | None:
        """One more column, of a score per head."""
        by: Node = step.found["by"]
        scores = step.node.meta["example_value"]
        shape = by.meta["example_value"].shape
        if scores.dim() != 4 or list(shape) != [1, self.heads, 1, 1]:
            return f"the last column is made of {list(shape)}, expected one score per head"
        self.sinks = by
        return None

    def view(self, step: Step) -> str | None:
        """Batch and heads become one dimension, or two again."""
        old, new = (n.meta["example_value"].shape for n in (step.node.args[0], step.node))  # type: ignore[union-attr]
        rows = all(map(same_size, old[-2:], new[-2:]))
        if not rows or len(new) not in (3, 4) or (len(new) == 4 and new[1] != self.heads):
            return "the view does more than join or split batch and heads"
        return None

    def _broadcast(
        self, kind: Literal["add", "hide", "show"], by: Node, at: Node, fill: float = 0.0
    ) -> str | None:
        """A step of the mask by a tensor, unless it does not fit the scores at ``at``."""
        shape, scores = by.meta["example_value"].shape, at.meta["example_value"]
        joined = scores.dim() == 3 and len(shape) == 3 and shape[0] != 1
        if not 2 <= len(shape) <= 4:
            return f"the mask has {len(shape)} dimensions"
        if isinstance(shape[-1], int) and shape[-1] == 1:
            return "the mask has one column for all tokens"
        per_head = shape[-3] if len(shape) > 2 and not joined else 1
        if per_head not in (1, self.heads):
            return f"the mask has {per_head} heads, the query {self.heads}"
        self.mask.append(MaskStep(kind, by, fill, joined, scores.dtype))
        return None


# softmax(s - c) = softmax(s) for a c per row: a "shift" changes nothing.
_STEPS: dict[str, Callable[[Scores, Step], str | None]] = {
    "cast": lambda scores, step: None,
    "contiguous": lambda scores, step: None,
    "view": Scores.view,
    "mul": lambda scores, step: scores.mul(_by(step)),
    "div": lambda scores, step: scores.mul(1.0 / _by(step) if _by(step) else math.inf),
    "tanh": lambda scores, step: scores.tanh(),
    "add": lambda scores, step: scores.add(step.found["by"], step.node),
    "hide": lambda scores, step: scores.hide(step, "hide"),
    "show": lambda scores, step: scores.hide(step, "show"),
    "floor": Scores.floor,
    "sinks": Scores.sink,
    "shift": lambda scores, step: _shift(step),
}


def fold_scores(found: Captures, heads: int) -> Scores | Miss:
    """The scores of a matched product, softmax and what is between them.

    Args:
        found: what the pattern captured.
        heads: of the query.
    """
    scores, product = Scores(heads), found["product"]
    if op_name(product) == "baddbmm" and (reason := _baddbmm(scores, product)):
        return Miss(reason, product)
    for step in found["score_steps"]:
        after_sinks = scores.sinks is not None and step.name not in ("cast", "shift")
        reason = f"{step.name} after the sinks" if after_sinks else _STEPS[step.name](scores, step)
        if reason:
            return Miss(reason, step.node)
    # softcap * tanh(pre * s) is written softcap * tanh(scale * s / softcap) from here on.
    if scores.softcap:
        scores.scale *= scores.softcap
    return scores


def _baddbmm(scores: Scores, node: Node) -> str | None:
    alpha, beta = (number(argument(node, name)) for name in ("alpha", "beta"))
    base = argument(node, "input")
    if alpha is None or beta not in (0.0, 1.0):
        return f"baddbmm with beta {argument(node, 'beta')} and alpha {argument(node, 'alpha')}"
    if reason := scores.mul(alpha):
        return reason
    empty = op_name(base) in ("zeros", "zeros_like", "new_zeros")
    return None if beta == 0 or empty else scores.add(base, node)


def _shift(step: Step) -> str | None:
    same = row_maximum_of(step.found["by"]) is step.node.args[0]
    return None if same else "another tensor is subtracted"


def row_maximum_of(node: Any) -> Any:
    """``x`` if ``node`` is the maximum of each row of ``x``, as a column; else None."""
    if op_name(node) == "getitem" and node.args[1] == 0:
        node = node.args[0]
    elif op_name(node) != "amax":
        return None
    if op_name(node) not in ("max", "amax"):
        return None
    options = [*node.args[1:], node.kwargs.get("dim"), node.kwargs.get("keepdim")]
    return node.args[0] if -1 in options and True in options else None


def _by(step: Step) -> float:
    value = number(step.found["by"])
    assert value is not None
    return value


def number(value: Any) -> float | None:
    """``value``, if it is a number or a node that makes a tensor of one."""
    if isinstance(value, Node):
        if op_name(value) == "tensor":
            return number(argument(value, "data"))
        if op_name(value) == "full" and argument(value, "size") in ((), []):
            return number(argument(value, "fill_value"))
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
