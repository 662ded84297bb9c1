"""SKVQ: groups of like channels, clipped, behind an exact window (Duanmu et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from kvpass.calibration.channels import cluster
from kvpass.calibration.clipping import ClipSearch
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
    Name,
    Shape,
    Stored,
)
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import check, check_choice, check_flag, is_number
from kvpass.format.channels import ChannelOrder
from kvpass.format.codec import BITS, Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.rope import Rope
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
            False. It changes nothing where a group is a whole head.
        ternary_in_2bit: 1.5 bits take 2 bits of memory, not 1.6.
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

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            fits = is_number(bits) and bits in BITS
            check(name, bits, fits, ", ".join(map(str, BITS)))
        for name in ("fp8", "ternary_in_2bit"):
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

    def _tensor(self, bits: float, dim: int) -> TensorPlan:
        group = math.gcd(128, dim) if self.group is None else self.group
        clip = float(self.clip) if self.clip and self.clip is not True else 1.0
        ternary_in_2bit = self.ternary_in_2bit and bits == 1.5
        codec = Codec(bits, "token", group, clip, "fp8" if self.fp8 else "half", ternary_in_2bit)
        return TensorPlan(codec, RetentionPolicy(self.window, 1, self.sinks))

    def start(
        self, layer: str, key_dim: int, value_dim: int, heads: int | None = None
    ) -> LayerPlan:
        """A layer's plan before anything is known of its channels."""
        keys = self._tensor(self.key_bits, key_dim)
        plan = LayerPlan(keys, self._tensor(self.value_bits, value_dim))
        plan.check(layer, key_dim, value_dim, heads)
        return plan

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan without calibration; a `PlanError` if the options need one."""
        if self.calibrated:
            raise calibration_needed(self.name, ", or set clip=False and reorder=False")
        return self.start(path, key_dim, value_dim)

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """See `Recipe.sized`: orders and factors of clipping take no room."""
        layers = {path: self.start(path, k, v, heads) for path, (heads, k, v) in shapes.items()}
        return Plan(layers=layers, recipe=self.name)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Orders from the ranges of channels, then factors of clipping from attention outputs."""
        plans = self._ordered(run, seed)
        if self.clip is True:
            searches = {
                layer: ClipSearch(plan, seed + i) for i, (layer, plan) in enumerate(plans.items())
            }
            run(lambda sample: searches[sample.layer].add(sample), "clipping")
            plans = {layer: search.clipped() for layer, search in searches.items()}
        return Plan(self.start("*", 128, 128), plans, self.name)

    def _ordered(self, run: CalibrationRunner, seed: int) -> dict[str, LayerPlan]:
        """The plans of all layers, with orders of their channels."""
        ranges: dict[Name, Thresholds] = {}
        rotated: dict[str, tuple[Rope, ...]] = {}
        plans: dict[str, LayerPlan] = {}

        def observe(sample: AttentionSample) -> None:
            layer = sample.layer
            if layer not in plans:
                heads, key_dim, value_dim = sample.shape
                plans[layer] = self.start(layer, key_dim, value_dim, heads)
                rotated[layer] = sample.rotations
            for kind in STORED if self.reorder else ():
                if (layer, kind) not in ranges:
                    ranges[layer, kind] = Thresholds(0, run.tokens(self.sinks), self.sinks)
                ranges[layer, kind].add(sample.stored(kind, before_rope=False))

        run(observe, "ranges of channels")
        if not self.reorder:
            return plans

        def ordered(layer: str, kind: Stored) -> tuple[TensorPlan, ChannelOrder | None]:
            plan, _, _ = plans[layer].stored(kind)
            features = torch.stack(ranges[layer, kind].bounds(), dim=2).cpu()
            together = rotated[layer] if kind == "keys" else ()
            balanced = self.reorder == "balanced"
            order, codec = cluster(features, plan.codec, together, seed, balanced)
            return replace(plan, codec=codec), order

        for layer in plans:
            (keys, key_basis), (values, value_basis) = (ordered(layer, kind) for kind in STORED)
            plans[layer] = LayerPlan(keys, values, key_basis, value_basis)
        return plans
