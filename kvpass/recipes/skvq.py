"""SKVQ: groups of like channels, clipped, behind an exact window (Duanmu et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import ClassVar, Literal

from kvpass.calibration.channels import Clusters
from kvpass.calibration.clipping import ALPHAS, ClipSearch
from kvpass.calibration.ordering import OrderSearch
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
)
from kvpass.errors import check, check_choice, check_flag, is_number
from kvpass.format.codec import BITS, Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import Recipe, calibration_needed


@dataclass(frozen=True)
class Skvq(Recipe):
    """Keys and values per token, in groups of channels.

    Attributes:
        key_bits, value_bits: 1, 1.5, 2, 3, 4 or 8.
        group: channels that share a scale; more than a head has are those of several heads. None:
            128, or the largest divisor of 128 that divides the head dimension.
        window: tokens that stay exact, the last ones.
        sinks: tokens that stay exact, the first ones.
        fp8: scales and minima are fp8-e4m3 instead of half.
        clip: the factor for the ends of a group's range. True: searched for every group of every
            head (eq. 3).
        reorder: channels that are alike share a group: ``balanced`` (k-means, cut evenly),
            ``clusters`` (the clusters themselves, of unequal size; only in plain PyTorch), or
            False. It changes nothing where a group is a whole head, and is kept where the attention
            output's error is less with it than in the model's order.
        ternary_in_2bit: 1.5 bits take 2 bits of memory, not 1.6.
        before_rope: keys are stored before their rotary embedding, in the model's order, as the
            authors' code has them.
    """

    renamed: ClassVar[dict[str, str]] = {"slots": "ternary_in_2bit"}

    key_bits: float = 2
    value_bits: float = 2
    group: int | None = None
    window: int = 128
    sinks: int = 5
    fp8: bool = True
    clip: bool | float = True
    reorder: Literal["balanced", "clusters", False] = "balanced"
    ternary_in_2bit: bool = False
    before_rope: bool = False

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            fits = is_number(bits) and bits in BITS
            check(name, bits, fits, ", ".join(map(str, BITS)))
        for name in ("fp8", "ternary_in_2bit", "before_rope"):
            check_flag(name, getattr(self, name))
        check_choice("reorder", self.reorder, ("balanced", "clusters", False))
        fits = isinstance(self.clip, bool | int | float) and 0 <= self.clip <= 1
        check("clip", self.clip, fits, "True (searched), False, or a number above 0, at most 1")
        # Bad combinations should be reported before any graph is compiled.
        self._tensor(self.key_bits, 128)
        self._tensor(self.value_bits, 128)

    @property
    def name(self) -> str:
        """E.g. ``skvq-k2v1.5``."""
        return f"skvq-k{self.key_bits}v{self.value_bits}"

    @property
    def calibrated(self) -> bool:
        """Orders and searched factors come from texts."""
        return self.clip is True or self.reorder is not False

    @property
    def _clip(self) -> float:
        """The factor of all groups before any is searched."""
        return float(self.clip) if self.clip and self.clip is not True else 1.0

    def _tensor(self, bits: float, dim: int) -> TensorPlan:
        group = math.gcd(128, dim) if self.group is None else self.group
        ternary_in_2bit = self.ternary_in_2bit and bits == 1.5
        codec = Codec(
            bits, "token", group, self._clip, "fp8" if self.fp8 else "half", ternary_in_2bit
        )
        return TensorPlan(codec, RetentionPolicy(self.window, 1, self.sinks))

    def start(
        self, layer: str, key_dim: int, value_dim: int, heads: int | None = None
    ) -> LayerPlan:
        """See `Recipe.start`: orders and factors of clipping take no room."""
        keys = self._tensor(self.key_bits, key_dim)
        values = self._tensor(self.value_bits, value_dim)
        plan = LayerPlan(keys, values, before_rope=self.before_rope)
        plan.check(layer, key_dim, value_dim, heads)
        return plan

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan without calibration; a `PlanError` if the options need one."""
        if self.calibrated:
            raise calibration_needed(self.name, ", or set clip=False and reorder=False")
        return self.start(path, key_dim, value_dim)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Orders from the ranges of channels; factors of clipping, and which orders are kept, from
        the errors of attention outputs."""
        ways = self._ordered(run, seed)
        factors = ALPHAS if self.clip is True else (self._clip,)
        # Where no order changes a group, both ways are one.
        different = {layer: dict.fromkeys(way[layer] for way in ways) for layer in ways[0]}
        searches = {
            layer: [ClipSearch(plan, seed + i, factors) for plan in plans]
            for i, (layer, plans) in enumerate(different.items())
        }

        def search(sample: AttentionSample) -> None:
            for way in searches[sample.layer]:
                way.add(sample)

        run(search, "clipping")
        layers = {layer: _best(found, self.clip is True) for layer, found in searches.items()}
        return Plan(self.start("*", 128, 128), layers, self.name)

    def _ordered(self, run: CalibrationRunner, seed: int) -> list[dict[str, LayerPlan]]:
        """The plans of all layers in the model's order, and with orders of their channels, if they
        are wanted."""
        plans: dict[str, LayerPlan] = {}
        orders: dict[str, OrderSearch | Clusters] = {}

        def observe(sample: AttentionSample) -> None:
            layer = sample.layer
            if layer not in plans:
                heads, key_dim, value_dim = sample.shape
                plans[layer] = self.start(layer, key_dim, value_dim, heads)
                if self.reorder:
                    kind = OrderSearch if self.reorder == "balanced" else Clusters
                    orders[layer] = kind(plans[layer], run.tokens(self.sinks), seed)
            if self.reorder:
                orders[layer].add(sample)

        run(observe, "channels")
        if not self.reorder:
            return [plans]
        return [plans, {layer: found.ordered() for layer, found in orders.items()}]


def _best(searches: Sequence[ClipSearch], clipped: bool) -> LayerPlan:
    """Keys, and values, with the least error; the first, if all have as much."""
    keys, values = (min(searches, key=methodcaller("error", kind)) for kind in STORED)
    plans = [found.clipped() if clipped else found.plan for found in (keys, values)]
    return replace(plans[0], values=plans[1].values, value_basis=plans[1].value_basis)
