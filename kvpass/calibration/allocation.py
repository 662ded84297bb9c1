"""`allocate`: which candidate each tensor gets, so that a budget is kept at the least cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from kvpass.calibration.samples import STORED
from kvpass.calibration.scores import Name, Scores
from kvpass.errors import OptionError, shown
from kvpass.plan import LayerPlan, Plan


@dataclass(frozen=True)
class Allocation:
    """A plan, and what it is predicted to be.

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


@dataclass(frozen=True)
class _Choice:
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
        max_bytes: of a cache of so many ``tokens`` of one sequence, its exact tokens not counted;
            the least cost is wanted.
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
    cost, bits = _totals(scores)
    elements = sum(t.heads * t.dim for t in scores.tensors.values())
    if max_perplexity_increase is not None and (budget_bits, max_bytes) == (None, None):
        _positive("max_perplexity_increase", max_perplexity_increase)
        if scores.by != "loss":
            raise OptionError(
                f"max_perplexity_increase={max_perplexity_increase} needs scores by 'loss', not "
                f"'{scores.by}'."
            )
        limited, limit, wanted = cost, math.log1p(max_perplexity_increase), bits
        text = f"max_perplexity_increase={max_perplexity_increase}"
    elif budget_bits is not None and (max_bytes, max_perplexity_increase) == (None, None):
        limited, limit, wanted = bits, _positive("budget_bits", budget_bits) * elements, cost
        text = f"budget_bits={budget_bits}"
    elif max_bytes is not None and (budget_bits, max_perplexity_increase) == (None, None):
        per_token = _positive("max_bytes", max_bytes) / _positive("tokens", tokens)
        limited, limit, wanted = bits, 8 * per_token, cost
        text = f"max_bytes={max_bytes} for {tokens} tokens"
    else:
        raise OptionError(
            "allocate needs one of budget_bits, max_bytes and max_perplexity_increase."
        )
    best = _solve(wanted, limited, limit)
    if best is None:
        least = sum(_least(limited).values())
        raise OptionError(
            f"{text} cannot be kept: the candidates come to {least / limit:.3g} times that."
        )
    return Allocation(
        plan=_joined(scores, best),
        bits=sum(bits[c] for c in best) / elements,
        cost=sum(cost[c] for c in best),
        chosen={(c.layer, kind): getattr(c, kind) for c in best for kind in STORED},
    )


def _positive(name: str, value: float | None) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not number or not 0 < value < math.inf:
        raise OptionError(f"{name}={shown(value)} is not supported; allowed: a number above 0.")
    return float(value)


def _totals(scores: Scores) -> tuple[dict[_Choice, float], dict[_Choice, float]]:
    """The cost and the bits of a token for every choice there is."""
    cost, bits = {}, {}
    for choice in _choices(scores):
        keys, values = (scores.tensors[choice.layer, kind] for kind in STORED)
        cost[choice] = keys.costs[choice.keys] + values.costs[choice.values]
        bits[choice] = (
            keys.bits[choice.keys] * keys.heads * keys.dim
            + values.bits[choice.values] * values.heads * values.dim
        )
    return cost, bits


def _choices(scores: Scores) -> Iterator[_Choice]:
    """Keys and values with the same sinks: no kernel takes others."""
    for layer in dict.fromkeys(layer for layer, _ in scores.tensors):
        plans = [plan.layer(layer) for plan in scores.candidates]
        for (i, k), (j, v) in product(enumerate(plans), repeat=2):
            exact = k.keys.codec.identity or v.values.codec.identity
            if exact or k.keys.sinks == v.values.sinks:
                yield _Choice(layer, i, j)


def _solve(
    wanted: Mapping[_Choice, float], limited: Mapping[_Choice, float], limit: float
) -> list[_Choice] | None:
    """One choice of every layer, so that ``limited`` sums up to ``limit`` at most and ``wanted`` to
    the least; None if there is none."""
    choices = list(wanted)
    layers = list(dict.fromkeys(c.layer for c in choices))
    once = np.array([[float(c.layer == layer) for c in choices] for layer in layers])
    costs, sizes = (np.array([x[c] for c in choices]) for x in (wanted, limited))
    # The solver's tolerances are absolute.
    scale = max(abs(limit), 1e-30)
    found = milp(
        costs / max(float(np.abs(costs).max()), 1e-30),
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(sizes[None] / scale, -np.inf, limit / scale + 1e-9),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return [c for c, taken in zip(choices, found.x, strict=True) if taken > 0.5]


def _least(limited: Mapping[_Choice, float]) -> dict[str, float]:
    """The least of every layer."""
    found: dict[str, float] = {}
    for choice, size in limited.items():
        found[choice.layer] = min(size, found.get(choice.layer, math.inf))
    return found


def _joined(scores: Scores, chosen: list[_Choice]) -> Plan:
    layers = {}
    for choice in chosen:
        k = scores.candidates[choice.keys].layer(choice.layer)
        v = scores.candidates[choice.values].layer(choice.layer)
        layers[choice.layer] = LayerPlan(
            k.keys, v.values, k.key_order, v.value_order, k.before_rope, k.key_ranges
        )
    known = (p.calibration for p in scores.candidates if p.calibration is not None)
    first = scores.candidates[0]
    return replace(first, layers=layers, recipe="allocated", calibration=next(known, None))
