"""What an attention mask hides, proven from the index arithmetic that it is computed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy
import torch
from sympy import Expr, Integer
from torch.fx import Graph, Node

from kvpass.graph.analysis.formulas import AXES, Condition, K, Q, holds, plain, position
from kvpass.graph.analysis.indices import Indices, operation, tensor_type
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import op_name

_PASSING = ("same", "to")


@dataclass(frozen=True)
class Conjunct:
    """A part of a mask; all parts hold where a token is visible.

    Attributes:
        node: the bool tensor; the part is its complement if ``negated``.
        terms: formulas that are at least 0 where the part holds; None if it is data.
    """

    node: Node
    negated: bool
    terms: tuple[Expr, ...] | None


@dataclass(frozen=True)
class Reading:
    """A mask as the parts it is made of, in the order in which they are combined.

    Attributes:
        parts: see `Conjunct`.
        hiding: what is added to hidden scores; None for a bool mask.
    """

    parts: tuple[Conjunct, ...]
    hiding: float | None = None


@dataclass(frozen=True)
class Bounds:
    """A mask in terms of `kvpass.ops.attention`.

    Attributes:
        causal, window: its bounds.
        rest: what is left as a tensor: nodes (True: their complements) that all hold where a token
            is visible.
    """

    causal: bool
    window: int
    rest: tuple[tuple[Node, bool], ...]


@dataclass(frozen=True)
class Step:
    """Where the queries of a step stand: query ``i`` of ``n`` at column ``first + i``; columns from
    ``first + n`` on do not exist, or are not written yet."""

    first: Expr
    n: Expr


class Masks:
    """Reads the masks of one graph, as it was when this was made.

    Attributes:
        built: the tensors that were put in place of masks, by mask and `Bounds.rest`.
    """

    def __init__(self, graph: Graph) -> None:
        self.indices = Indices(graph)
        self.built: dict[tuple[Node, tuple[tuple[Node, bool], ...]], Node] = {}
        # Layers share masks.
        self._read = cache(self._parts)
        self._bounds = cache(self._bounds_at)

    def bounds(self, mask: Node, q: Node, positions: Node | None = None) -> Bounds | Miss:
        """``mask`` as bounds and as few tensors as possible.

        Args:
            mask: ``[B|1, Hq|1, n|1, L]``, bool or additive.
            q: the queries ``[B, Hq, n, D]``. They stand at the last columns.
            positions: ``[n]``, the columns that the step's tokens are written to, where the cache
                has room for more: a static cache.

        Returns:
            A `Miss` if nothing of the mask is understood. Otherwise attention with the bounds, and
            with the rest as its mask, is attention with ``mask``.
        """
        step = self._step(mask, q, positions)
        return step if isinstance(step, Miss) else self._bounds(mask, step)

    def _bounds_at(self, mask: Node, step: Step) -> Bounds | Miss:
        reading = self._read(mask)
        if isinstance(reading, Miss):
            return reading
        causal, windows, rest = False, [], []
        for part in reading.parts:
            found = [self._bound(term, step) for term in part.terms or ()]
            if part.terms is None or None in found:
                rest.append((part.node, part.negated))
                continue
            causal |= any(bound == "causal" for bound in found)
            windows += [bound for bound in found if isinstance(bound, int)]
        bounds = Bounds(causal, min(windows, default=0), tuple(rest))
        return self._checked(mask, reading, bounds)

    def hides_unwritten(self, mask: Node, positions: Node, counted: Expr | None = None) -> bool:
        """Whether ``mask`` provably hides all columns of a static cache that are not written yet.

        Args:
            mask: ``[B|1, Hq|1, n|1, room]``, bool or additive.
            positions: ``[n]``, the columns that the step's tokens are written to, as its
                ``index_copy_`` reads them.
            counted: a number that is to be taken for that of the tokens written before; only one
                by which every query sees itself.
        """
        reading = self._read(mask)
        step = self._static_step(positions)
        if isinstance(reading, Miss) or isinstance(step, Miss):
            return False
        if counted is not None:
            step = Step(counted, step.n)
            if not self._shows_itself([p for p in reading.parts if p.terms is not None], step):
                return False
        columns = {Q: (Integer(0), step.n - 1), K: (step.first + step.n, None)}
        if not any(
            holds(-term - 1, self.indices.limits, columns)
            for part in reading.parts
            for term in part.terms or ()
        ):
            return False
        return reading.hiding in (None, -torch.inf) or self._shows_itself(reading.parts, step)

    def padding(self, mask: Node) -> Node | None:
        """The bool tensor ``[B, columns]`` of which ``mask``, ``[B, 1, 1, L]``, is the first ``L``
        columns; None if it is something else."""
        source, index = mask.args[:2] if operation(mask) == "getitem" else (None, None)
        if not isinstance(index, tuple) or len(index) != 2 or tensor_type(source) != torch.bool:
            return None
        assert isinstance(source, Node)
        shape, given = self.indices.shape(mask), self.indices.shape(source)
        if len(shape) != 4 or len(given) != 2 or shape[1:3] != [1, 1] or shape[0] != given[0]:
            return None
        if not all(tensor_type(x) == torch.int64 for x in index) or self.indices.writes.to(source):
            return None
        rows, columns = (self.indices.formula(x, mask) for x in index)
        return source if (rows, columns) == (position(3, shape), K) else None

    def _parts(self, mask: Node) -> Reading | Miss:
        """The parts of ``mask``; a `Miss` if it is written to in place."""
        node, negated, hiding = mask, False, None
        example = mask.meta["example_value"]
        if example.dtype != torch.bool:
            found = self._additive(mask, example.dtype)
            if isinstance(found, Miss):
                return found
            node, negated, hiding = found
        parts: list[Conjunct] = []
        miss = self._collect(node, negated, parts)
        return miss or Reading(tuple(parts), hiding)

    def _additive(self, mask: Node, dtype: torch.dtype) -> tuple[Node, bool, float] | Miss:
        """Where a mask that is added to the scores is 0: at a bool tensor, or (True) outside."""
        if not dtype.is_floating_point:
            return Miss(f"the mask is {dtype}", mask)
        node = mask
        while operation(node) in _PASSING and isinstance(node.args[0], Node):
            if self.indices.writes.to(node):
                return Miss("the mask is written to in place", node)
            node = node.args[0]
        if self.indices.writes.to(node):
            return Miss("the mask is written to in place", node)
        name, args = operation(node), node.args
        if name not in ("where", "masked_fill") or len(args) != 3 or node.kwargs:
            return Miss(f"the additive mask comes from {op_name(node)}", node)
        by = args[0] if name == "where" else args[1]
        values = args[1:] if name == "where" else (args[2], args[0])
        if not isinstance(by, Node) or tensor_type(by) != torch.bool:
            return Miss(f"{op_name(node)} by no bool tensor", node)
        for inside, outside, negated in (*values, False), (*reversed(values), True):
            hiding = self._number(outside)
            if hiding is None or self.indices.formula(inside, node) != 0:
                continue
            hiding = float(torch.tensor(hiding, dtype=dtype))
            if hiding <= torch.finfo(dtype).min:
                return by, negated, hiding
        return Miss("the additive mask has other values than 0 and the smallest", node)

    def _number(self, value: Any) -> float | None:
        """The number that ``value`` is, or that all elements of its tensor are."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, Node) or self.indices.writes.to(value):
            return None
        if operation(value) == "full":
            return self._number(value.kwargs.get("fill_value", value.args[-1]))
        if operation(value) == "zeros":
            return 0.0
        return self._number(value.args[0]) if value.target is torch.tensor else None

    def _collect(self, node: Node, negated: bool, parts: list[Conjunct]) -> Miss | None:
        """Appends the parts of ``node``."""
        if self.indices.writes.to(node):
            return Miss("the mask is written to in place", node)
        name = operation(node)
        inner = [x for x in node.args[:2] if isinstance(x, Node) and tensor_type(x)]
        if not inner or any(tensor_type(x) != torch.bool for x in inner):
            name = None
        if name == ("or" if negated else "and") and len(inner) == 2:
            return self._collect(inner[0], negated, parts) or self._collect(
                inner[1], negated, parts
            )
        if name == "not" or name in _PASSING:
            return self._collect(inner[0], negated != (name == "not"), parts)
        formula = self.indices.formula(node)
        if isinstance(formula, Condition) and negated:
            formula = formula.negated()
        terms = formula.terms if isinstance(formula, Condition) else None
        parts.append(Conjunct(node, negated, terms))
        return None

    def _step(self, mask: Node, q: Node, positions: Node | None) -> Step | Miss:
        """Where the queries ``q`` stand among the columns of ``mask``."""
        length, n = self.indices.shape(mask)[-1], self.indices.shape(q)[-2]
        if length == 1:
            return Miss("the mask has one column for all tokens", mask)
        if positions is None:
            return Step(length - n, n)
        step = self._static_step(positions)
        if isinstance(step, Step) and sympy.expand(step.n - n) != 0:
            return Miss(f"{step.n} tokens are written, {n} attend", positions)
        return step

    def _static_step(self, positions: Node) -> Step | Miss:
        formula = self.indices.formula(positions)
        shape = self.indices.shape(positions)
        if isinstance(formula, Expr) and len(shape) == 1:
            first = sympy.expand(formula - (0 if shape[0] == 1 else K))
            if not first.has(*AXES):
                return Step(first, shape[0])
        return Miss("the new tokens are not written one after the other", positions)

    def _bound(self, term: Expr, step: Step) -> Literal["nothing", "causal"] | int | None:
        """What ``term >= 0`` says: a number is a window, None something else."""
        last = step.first + step.n - 1
        every = {K: (Integer(0), last), Q: (Integer(0), step.n - 1)}
        limits = self.indices.limits
        if holds(term, limits, every):
            return "nothing"
        own = step.first + (Integer(0) if step.n == 1 else Q)
        if plain(term - own + K, limits) == 0:
            return "causal"
        window = plain(term - K + own + 1, limits)
        return int(window) if window.is_Integer and window >= 1 else None

    def _checked(self, mask: Node, reading: Reading, bounds: Bounds) -> Bounds | Miss:
        """A miss if ``bounds`` do not help, or are not quite what the mask is."""
        columns = self.indices.shape(mask)[-1]
        for node, _ in bounds.rest:
            if node is mask or len(bounds.rest) == len(reading.parts):
                return Miss(f"{op_name(node)} is data, or no bound", node)
            shape = self.indices.shape(node)
            if len(shape) > 4 or not shape or shape[-1] != columns:
                return Miss("a part of the mask has other columns than the mask", node)
        if bounds.rest and reading.hiding not in (None, -torch.inf):
            # A query that sees no token averages over all with the smallest number, over none with
            # a bound: the bounds may not hide what it averages over.
            return Miss("an additive mask may hide all tokens of a query", bounds.rest[0][0])
        return bounds

    def _shows_itself(self, parts: Sequence[Conjunct], step: Step) -> bool:
        """Whether these parts of a mask show every query itself."""
        own = step.first + (Integer(0) if step.n == 1 else Q)
        queries = {Q: (Integer(0), step.n - 1)}
        return all(
            part.terms is not None
            and all(holds(t.subs(K, own), self.indices.limits, queries) for t in part.terms)
            for part in parts
        )
