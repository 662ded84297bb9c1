"""Proofs of inequalities."""

from __future__ import annotations

from itertools import product

import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Integer, Symbol

from kvpass._torch_sizes import Max, Min
from kvpass.graph.analysis.formulas import NEVER, Condition, K, Q, holds, plain, position

S, T = Symbol("s", integer=True), Symbol("t", integer=True)
FACTORS = st.integers(-2, 2)
RANGES = st.tuples(st.integers(-3, 3), st.integers(0, 4)).map(lambda r: (r[0], r[0] + r[1]))


@st.composite
def terms(draw):
    """Linear in two sizes and two positions, perhaps with a maximum or minimum."""
    size = draw(st.sampled_from([S, T, Max(0, S - 1), Min(S, T), Max(S, T)]))
    term = draw(FACTORS) * K + draw(FACTORS) * Q + draw(FACTORS) * size + draw(FACTORS) * S
    return term + draw(st.integers(-6, 12))


@settings(max_examples=25)
@given(terms(), RANGES, RANGES, st.integers(0, 2))
def test_what_is_proven_holds(term, s_range, t_range, more):
    positions = {K: (Integer(0), S + more), Q: (T - 1, T)}
    proven = holds(term, {S: s_range, T: t_range}, positions)
    sizes = product(*(range(low, high + 1) for low, high in (s_range, t_range)))
    found = [
        int(term.subs({K: k, Q: q, S: s, T: t}))
        for s, t in sizes
        for k in range(s + more + 1)
        for q in (t - 1, t)
    ]
    assert not proven or all(value >= 0 for value in found)


def test_what_can_be_proven():
    limits = {S: (16, None), T: (None, 3)}
    assert holds(S - 16, limits)
    assert not holds(S - 17, limits)
    assert not holds(100 - S, limits)
    assert holds(3 - T, limits)
    assert holds(S - 1 - K, limits, {K: (Integer(0), S - 1)})
    assert holds(K - S, limits, {K: (S, None)})
    assert not holds(S - K, limits, {K: (S, None)})
    assert not holds(S * S, limits)
    assert not holds(S * K, limits, {K: (Integer(0), Integer(1))})
    assert not holds(Symbol("other"), limits)
    assert plain(S - Max(0, S - 15), limits) == 15
    assert plain(Min(S, T), limits) == T
    assert plain(Max(0, T), limits) == Max(0, T)


def test_conditions():
    assert Condition.of(Integer(0), Integer(3)) == Condition()
    assert Condition.of(K, Integer(-2)) == NEVER
    assert Condition().negated() == NEVER
    assert NEVER.negated() == Condition()
    assert Condition.of(K - 3).negated() == Condition((2 - K,))
    assert Condition.of(K, Q).negated() is None


def test_an_axis_of_size_1_is_at_place_0():
    shape = [Integer(4), Integer(1), sympy.Symbol("s")]
    assert position(0, shape) == K
    assert position(1, shape) == 0
