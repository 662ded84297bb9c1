"""SKVQ: groups of like channels, clipped, behind an exact window (Duanmu et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvpass.calibration.channels import Ranges, cluster
from kvpass.calibration.clipping import ClipSearch
from kvpass.calibration.samples import AttentionSample, CalibrationRunner, Rotation
from kvpass.errors import OptionError, PlanError, shown
from kvpass.format.codec import Codec
from kvpass.format.order import ChannelOrder
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import Recipe

_BITS = (1, 1.5, 2, 3, 4, 8)
_CLIPS = "True (searched), False, or a number above 0, at most 1"


@dataclass(frozen=True)
class Skvq(Recipe):
    """Keys and values per token, in groups of channels.

    Attributes:
        key_bits, value_bits: 1, 1.5, 2, 3, 4 or 8.
        group: channels that share a scale; more than a head has are those of several heads. None:
            128, or the largest part of 128 that divides the head dimension.
        window: tokens that stay exact, the last ones.
        sinks: tokens that stay exact, the first ones.
        fp8: scales and minima are fp8-e4m3 instead of half.
        clip: what the ends of a group's range are multiplied by. True: searched for every group
            of every head (eq. 3).
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
            value = getattr(self, name)
            if value not in _BITS or isinstance(value, bool):
                raise OptionError(
                    f"{name}={shown(value)} is not supported; allowed: 1, 1.5, 2, 3, 4, 8."
                )
        for name in ("fp8", "ternary_in_2bit"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name}={shown(value)} is not supported; allowed: True, False.")
        if self.reorder not in ("balanced", "clusters", False):
            raise OptionError(
                f"reorder={shown(self.reorder)} is not supported; allowed: 'balanced', 'clusters', "
                "False."
            )
        if not isinstance(self.clip, bool | int | float) or not 0 <= self.clip <= 1:
            raise OptionError(f"clip={shown(self.clip)} is not supported; allowed: {_CLIPS}.")
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

    def start(self, layer: str, key_dim: int, value_dim: int) -> LayerPlan:
        """A layer's plan before anything is known of its channels.

        Raises:
            PlanError: if the options do not fit these heads.
        """
        keys, values = (
            self._tensor(self.key_bits, key_dim),
            self._tensor(self.value_bits, value_dim),
        )
        plan = LayerPlan(keys, values)
        plan.check(layer, key_dim, value_dim)
        return plan

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """Without calibration.

        Raises:
            PlanError: if there has to be one, or the options do not fit these heads.
        """
        if self.calibrated:
            raise PlanError(
                f"Recipe '{self.name}' is calibrated: use the plan that kvpass.calibrate(model, "
                f"'{self.name}', texts) makes, or set clip=False and reorder=False."
            )
        return self.start(path, key_dim, value_dim)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Orders from the ranges of channels, then factors of clipping from attention outputs."""
        plans = self._orders(run, seed)
        if self.clip is True:
            searches = {
                layer: ClipSearch(plan, seed + i) for i, (layer, plan) in enumerate(plans.items())
            }
            run(lambda seen: searches[seen.layer].add(seen), "clipping")
            plans = {layer: _clipped(plan, searches[layer]) for layer, plan in plans.items()}
        return Plan(self.start("*", 128, 128), plans, self.name)

    def _orders(self, run: CalibrationRunner, seed: int) -> dict[str, LayerPlan]:
        keys: dict[str, Ranges] = {}
        values: dict[str, Ranges] = {}
        rotated: dict[str, tuple[Rotation, ...]] = {}
        plans: dict[str, LayerPlan] = {}

        def look(seen: AttentionSample) -> None:
            if seen.layer not in plans:
                dims = (seen.keys.shape[3], seen.values.shape[3])
                plans[seen.layer] = self.start(seen.layer, *dims)
                plans[seen.layer].check(seen.layer, *dims, seen.keys.shape[1])
                rotated[seen.layer] = seen.rotations
            for ranges, tensor in ((keys, seen.keys), (values, seen.values)):
                ranges.setdefault(seen.layer, Ranges(self.sinks)).add(tensor)

        run(look, "ranges of channels")
        if self.reorder is False:
            return plans
        for layer, plan in plans.items():
            k, key_order = self._ordered(plan.keys, keys[layer], rotated[layer], seed)
            v, value_order = self._ordered(plan.values, values[layer], (), seed)
            plans[layer] = LayerPlan(k, v, key_order, value_order)
        return plans

    def _ordered(
        self, plan: TensorPlan, ranges: Ranges, rotated: tuple[Rotation, ...], seed: int
    ) -> tuple[TensorPlan, ChannelOrder | None]:
        balanced = self.reorder == "balanced"
        found = cluster(ranges.features(), plan.codec.group, rotated, seed, balanced)
        if found is None:
            return plan, None
        codec = replace(plan.codec, half_split=found.pairs, sizes=found.sizes)
        return replace(plan, codec=codec), found.order


def _clipped(plan: LayerPlan, search: ClipSearch) -> LayerPlan:
    keys, values = (
        replace(tensor, codec=replace(tensor.codec, clip=search.clip(kind)))
        for kind, tensor in (("keys", plan.keys), ("values", plan.values))
    )
    return replace(plan, keys=keys, values=values)
