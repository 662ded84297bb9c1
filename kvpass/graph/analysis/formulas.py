"""Formulas over the positions of a tensor's elements, and proofs of inequalities between them.

The last axis is ``k``, the one before it ``q``, then ``h`` and ``b``: broadcasting aligns axes at
the right, so elementwise operations combine formulas as they stand. An axis of size 1 is at
position 0. Numbers that are not known when a graph is compiled are symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from sympy import Dummy, Expr, Integer, Symbol

from kvpass._torch_sizes import Max, Min

AXES = tuple(Dummy(name, integer=True) for name in ("k", "q", "h", "b", "x4", "x5"))
K, Q = AXES[:2]
# Smallest and largest value of symbols; None: unbounded.
Limits: TypeAlias = Mapping[Symbol, tuple[int | None, int | None]]


@dataclass(frozen=True)
class Condition:
    """True where every one of ``terms`` is at least 0."""

    terms: tuple[Expr, ...] = ()

    @staticmethod
    def of(*terms: Expr) -> Condition:
        """The condition, with terms that are numbers decided."""
        plain = [sympy.expand(term) for term in terms]
        if any(t.is_Integer and t < 0 for t in plain):
            return NEVER
        return Condition(tuple(t for t in plain if not t.is_Integer))

    def negated(self) -> Condition | None:
        """The complement; None if it is no conjunction."""
        if len(self.terms) > 1:
            return None
        return Condition.of(-self.terms[0] - 1) if self.terms else NEVER


NEVER = Condition((Integer(-1),))
# What each element of a tensor is.
Formula: TypeAlias = Any | Condition
# When the first operand of each comparison is the smaller by ``gap``.
COMPARISONS: dict[str, Callable[[Expr], tuple[Expr, ...]]] = {
    "le": lambda gap: (gap,),
    "lt": lambda gap: (gap - 1,),
    "ge": lambda gap: (-gap,),
    "gt": lambda gap: (-gap - 1,),
    "eq": lambda gap: (gap, -gap),
}


def position(axis: int, shape: Sequence[Expr]) -> Expr:
    """The position on the ``axis``-th axis from the right."""
    return Integer(0) if shape[len(shape) - 1 - axis] == 1 else AXES[axis]


def holds(
    term: Expr, limits: Limits, positions: Mapping[Symbol, tuple[Expr, Expr | None]] | None = None
) -> bool:
    """Whether ``term`` is proven to be at least 0.

    Args:
        term: linear, otherwise nothing is proven.
        limits: of the symbols for numbers.
        positions: smallest and largest on each axis; None: unbounded.
    """
    term = plain(term, limits)
    for axis, (first, last) in (positions or {}).items():
        slope = term.coeff(axis)
        worst = last if slope.is_negative else first
        if worst is None or not slope.is_Integer:
            return False
        term = plain(term.subs(axis, worst), limits)
    minimum = Integer(0)
    for symbol, slope in term.as_coefficients_dict().items():
        smallest, largest = (1, 1) if symbol == 1 else limits.get(symbol, (None, None))
        worst = largest if slope < 0 else smallest
        if worst is None:
            return False
        minimum += slope * worst
    return bool(minimum >= 0)


def plain(term: Expr, limits: Limits) -> Expr:
    """``term`` expanded, with every maximum and minimum replaced that the limits decide."""
    for kind, sign in ((Max, 1), (Min, -1)):
        for choice in term.atoms(kind):
            for best in choice.args:
                others = [x for x in choice.args if x is not best]
                if all(holds(sign * (best - x), limits) for x in others):
                    term = term.subs(choice, best)
                    break
    return sympy.expand(term)
