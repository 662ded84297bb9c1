"""Tensors read as formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpass.graph.analysis.formulas import AXES, Condition
from kvpass.graph.analysis.indices import Indices
from tests.graph.captured import Captured, conditions, function_of, inputs, materialised


def check(captured: Captured) -> int:
    """Every formula of the graph says what its tensor holds. Returns how many there are."""
    indices, values = Indices(captured.graph), captured.values()
    symbols, found = captured.symbols(indices), 0
    for node, value in values.items():
        formula = indices.formula(node) if isinstance(value, Tensor) else None
        terms = formula.terms if isinstance(formula, Condition) else (formula,)
        if formula is None or any(t.free_symbols - {*symbols, *AXES} for t in terms):
            continue
        known = materialised(formula, value.shape, symbols)
        assert torch.equal(known.to(value.dtype), value), (node, formula)
        found += value.dim() > 0
    return found


@settings(max_examples=30)
@given(conditions(), st.booleans(), st.integers(1, 3), st.integers(1, 4), st.integers(2, 9))
def test_formulas_are_what_tensors_hold(condition, dynamic, batch, n, past):
    captured = Captured(function_of(returns=f"{condition}, q + 0"), dynamic)
    for more in (0, 3):
        check(captured(*inputs(batch, n, past + more)))


SPELLINGS = {
    "slices": "torch.arange(L)[2:][:3] - 2 * torch.arange(3) + torch.arange(9)[4]",
    "negative places": "torch.arange(L)[-1] + torch.arange(L)[..., 1:]",
    "views": "torch.arange(L).reshape(L, 1).unsqueeze(0).squeeze(2).view(1, 1, L)",
    "products": "-torch.arange(L) * 3 + torch.full((), 7)",
    "triangles": "torch.ones(n, L).triu(1) == 0",
    "triangles of integers": "torch.ones(L, L, dtype=torch.int64).tril(-1).ne(0)",
    "comparisons": "torch.arange(L).ge(2) & (torch.arange(L) <= 1 + c).logical_not()",
    "numbers": "torch.arange(n) + c.to('cpu').view(()).clone()",
}


@pytest.mark.parametrize("source", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_spellings(source, dynamic):
    captured = Captured(function_of(returns=f"{source}, q + 0"), dynamic)(*inputs(2, 2, 5))
    assert check(captured)
    assert Indices(captured.graph).formula(captured.results[0]) is not None


UNKNOWN = {
    "floats": "torch.arange(L, dtype=torch.float32) + 0.5",
    "narrow integers": "torch.arange(L).to(torch.int8)",
    "steps": "torch.arange(L)[::2]",
    "data": "pad.to(torch.int64)",
    "lookups": "torch.arange(L)[pad.long()]",
    "reinterpreted": "torch.arange(L).view(torch.int32)",
    "merged axes": "(torch.arange(n)[:, None] + torch.arange(L)).view(n * L)",
    "products of places": "torch.arange(L) * torch.arange(L)",
    "not equal": "torch.arange(L) != torch.arange(n)[:, None]",
    "complements of bands": "~((torch.arange(L) > 1) & (torch.arange(L)[:, None] > 3))[None]",
    "scaled sums": "torch.add(torch.arange(L), torch.arange(L), alpha=2)",
    "floored": "torch.arange(L) // 2",
    "written to": "(x := torch.arange(L), x.add_(1))[0]",
    "assigned": "(x := torch.arange(L), x.__setitem__(0, 3))[0]",
    "written through a view": "(x := torch.arange(L), x[1:].zero_())[0]",
}


@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN)
def test_what_has_no_formula(source):
    captured = Captured(function_of(returns=f"{source}, q + 0"), True)(*inputs(2, 2, 5))
    check(captured)
    assert Indices(captured.graph).formula(captured.results[0]) is None


def test_numbers_are_read_when_they_are_read():
    lines = ["early = torch.arange(n) + c", "alias = c.to('cpu')", "c.add_(n)", "c.add_(1)"]
    late = "torch.arange(n) + alias, alias.clone(), torch.arange(n) + c"
    captured = Captured(function_of(*lines, returns=f"early, {late}"))(*inputs(2, 3, 5))
    indices = Indices(captured.graph)
    early, alias, number, again = (indices.formula(x) for x in captured.results)
    assert alias - early == again - early == 4
    assert (number - early).subs(dict.fromkeys((number - early).free_symbols, 0)) == 4
    check(captured)


def test_an_unknown_write_makes_a_number_unknown():
    function = function_of("c.mul_(2)", returns="torch.arange(n) + c, q + 0")
    captured = Captured(function)(*inputs(2, 3, 5))
    assert Indices(captured.graph).formula(captured.results[0]) is None
