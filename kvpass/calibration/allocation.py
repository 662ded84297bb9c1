"""`allocate`: which candidate each tensor gets, so that a budget is kept at the least cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from kvpass.calibration.samples import STORED, Name
from kvpass.calibration.scores import Scores
from kvpass.errors import OptionError, check, is_number
from kvpass.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Allocation:
    """A plan, and what it is predicted to cost.

    Attributes:
        plan: for the model that was scored.
        bits: per element, a mean over keys and values of all layers; exact tokens are not counted.
        cost: the sum of the chosen costs, see `kvpass.calibration.scores.Scores`.
        chosen: the position of the candidate that each tensor got.
    """

    plan: Plan
    bits: float
    cost: float
    chosen: Mapping[Name, int]


class _Choice(NamedTuple):
    """Candidates for the keys and the values of one layer."""

    layer: str
    keys: int
    values: int


def allocate(
    scores: Scores,
    *,
    budget_bits: float | None = None,
    max_bytes: float | None = None,
    tokens: int | None = None,
    max_perplexity_increase: float | None = None,
) -> Allocation:
    """Chooses a candidate for the keys, and one for the values, of every layer (KVmix, section 3.2;
    KVQuant, appendix P), exactly: as an integer program (HiGHS, by ``scipy.optimize.milp``).

    Args:
        scores: from `kvpass.score`.
        budget_bits: bits per element at most; the least cost is wanted.
        max_bytes: bytes at most of a cache of so many ``tokens`` of one sequence, exact ones not
            counted; the least cost is wanted.
        max_perplexity_increase: e.g. 0.01 for 1%; the fewest bits are wanted. Needs scores by
            ``loss``, whose sum the increase of the loss is taken for.

    Raises:
        OptionError: if there is not exactly one limit, its value is not allowed, or no choice
            keeps it.
    """
    if not isinstance(scores, Scores):
        raise OptionError(
            f"scores of type {type(scores).__name__} are not supported; allowed: what kvpass.score "
            "returns."
        )
    choices = list(_choices(scores))
    elements = {name: t.heads * t.dim for name, t in scores.tensors.items()}
    sizes = {n: [b * elements[n] for b in t.bits] for n, t in scores.tensors.items()}
    cost = _totals(choices, {name: t.costs for name, t in scores.tensors.items()})
    bits = _totals(choices, sizes)
    names = ("budget_bits", "max_bytes", "max_perplexity_increase")
    values = zip(names, (budget_bits, max_bytes, max_perplexity_increase), strict=True)
    given = [(name, value) for name, value in values if value is not None]
    if len(given) != 1:
        raise OptionError(f"allocate needs one of {names[0]}, {names[1]} and {names[2]}.")
    limit, text = _positive(*given[0]), "{}={}".format(*given[0])
    wanted, limited = cost, bits
    if budget_bits is not None:
        limit *= sum(elements.values())
    elif max_bytes is not None:
        limit, text = 8 * limit / _positive("tokens", tokens), f"{text} for {tokens} tokens"
    elif scores.by == "loss":
        wanted, limited, limit = bits, cost, math.log1p(limit)
    else:
        raise OptionError(f"{text} needs scores by 'loss', not '{scores.by}'.")
    layers = dict.fromkeys(c.layer for c in choices)
    in_layer = np.array([[c.layer == layer for c in choices] for layer in layers])
    taken = _solve(in_layer, wanted, limited, limit)
    if taken is None:
        least = np.where(in_layer, limited, np.inf).min(1).sum()
        raise OptionError(
            f"{text} cannot be kept: the candidates come to {least / limit:.3g} times that."
        )
    best = [choice for choice, chosen in zip(choices, taken, strict=True) if chosen]
    return Allocation(
        plan=_joined(scores, best),
        bits=float(bits[taken].sum() / sum(elements.values())),
        cost=float(cost[taken].sum()),
        chosen={(c.layer, kind): getattr(c, kind) for c in best for kind in STORED},
    )


def cost_curve(scores: Scores, budgets: Iterable[float]) -> list[Allocation]:
    """What `allocate` finds for each of these budgets of bits per element, one scoring for all:
    plans, and predicted costs (`Allocation.cost`) against bits (`Allocation.bits`).

    Raises:
        OptionError: as `allocate`.
    """
    return [allocate(scores, budget_bits=budget) for budget in budgets]


def _positive(name: str, value: Any) -> float:
    check(name, value, is_number(value) and 0 < value < math.inf, "a number above 0")
    return float(value)


def _choices(scores: Scores) -> Iterator[_Choice]:
    """Keys and values with the same sinks: no kernel takes others."""
    for layer in dict.fromkeys(layer for layer, _ in scores.tensors):
        plans = [plan.layer(layer) for plan in scores.candidates]
        for (i, k), (j, v) in product(enumerate(plans), repeat=2):
            exact = k.keys.codec.identity or v.values.codec.identity
            if exact or k.keys.sinks == v.values.sinks:
                yield _Choice(layer, i, j)


def _totals(choices: Sequence[_Choice], tensors: Mapping[Name, Sequence[float]]) -> Floats:
    """Sums over keys and values, for each choice."""
    return np.array(
        [tensors[c.layer, "keys"][c.keys] + tensors[c.layer, "values"][c.values] for c in choices]
    )


def _solve(
    in_layer: NDArray[np.bool_], wanted: Floats, limited: Floats, limit: float
) -> NDArray[np.bool_] | None:
    """The choices to take: one of every layer ``[layers, choices]``, so that ``limited`` sums up
    to ``limit`` at most and ``wanted`` to the least; None if there are none."""
    # The solver's tolerances are absolute.
    scale = max(limit, 1e-30)
    found = milp(
        wanted / max(float(np.abs(wanted).max()), 1e-30),
        integrality=np.ones(len(wanted)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(in_layer.astype(float), 1, 1),
            LinearConstraint(limited[None] / scale, -np.inf, limit / scale + 1e-9),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return None if found.x is None else found.x > 0.5


def _joined(scores: Scores, chosen: Sequence[_Choice]) -> Plan:
    layers = {}
    for choice in chosen:
        k = scores.candidates[choice.keys].layer(choice.layer)
        v = scores.candidates[choice.values].layer(choice.layer)
        layers[choice.layer] = replace(k, values=v.values, value_basis=v.value_basis)
    known = (p.calibration for p in scores.candidates if p.calibration is not None)
    first = scores.candidates[0]
    return replace(first, layers=layers, recipe="allocated", calibration=next(known, None))
