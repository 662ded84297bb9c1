"""KVmix: more bits for the layers on whose weights the loss depends most (Li et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from kvpass.calibration.importance import means
from kvpass.calibration.samples import STORED, CalibrationRunner, Name, Shape, layer_shapes
from kvpass.errors import check, check_choice, is_number
from kvpass.format.codec import Codec
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import CalibratedRecipe
from kvpass.recipes.kivi import Kivi

_CHOICES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        ("key_bits", "value_bits", "more_key_bits", "more_value_bits"), (1, 2, 3, 4, 8)
    ),
    "exact": ("window", "pivotal", "fraction"),
    "packing": ("3-bit", "11-per-int32"),
}


@dataclass(frozen=True)
class Kvmix(CalibratedRecipe):
    """Keys per channel and values per token, as KIVI has them; bits by layer, for each apart.

    The layers with the largest gradients of ``W_k`` get more bits for their keys, those with the
    largest of ``W_v`` for their values (section 3.2).

    Of the recent tokens either a fixed number stays exact, as KIVI's, or a ratio, by the layer's
    importance ("Dynamic Pivotal Context Selection"); then whole groups of others are packed.

    Attributes:
        key_bits, value_bits: bits in most layers.
        more_key_bits, more_value_bits: bits in the important ones.
        share: how much of the layers is important, 0 to 1.
        group: as KIVI's.
        exact: which tokens stay so: those of a "window"; a "pivotal" ratio of the exact ones at
            each step, as the paper's rule is written, which soon leaves a few; or a "fraction" of
            all, as its text promises. See `kvpass.format.retention.RetentionPolicy`.
        residual: tokens of the window, as KIVI's.
        ratio, more_ratio: how much stays exact in most and in the important layers, 0 to 1.
        packing: how 3 bits are packed: "3-bit", which loses nothing, or "11-per-int32", as the
            paper has it. Heads of 64 and 128 channels take as many bytes either way, and the error
            of the latter is larger: it is there to be compared (`python -m examples.kvmix_parts`).
    """

    key_bits: int = 2
    value_bits: int = 2
    more_key_bits: int = 3
    more_value_bits: int = 4
    share: float = 0.25
    group: int | None = None
    residual: int = 128
    exact: Literal["window", "pivotal", "fraction"] = "window"
    ratio: float = 0.1
    more_ratio: float = 0.2
    packing: Literal["3-bit", "11-per-int32"] = "3-bit"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check("share", self.share, is_number(self.share) and 0 <= self.share <= 1, "from 0 to 1")
        for name in ("ratio", "more_ratio"):
            ratio = getattr(self, name)
            fits = isinstance(ratio, float) and 0 < ratio < 1 and round(ratio, 3) == ratio
            check(name, ratio, fits, "from 0.001 to 0.999, in steps of 0.001")
        # KIVI checks group and residual.
        _ = self._base

    @property
    def name(self) -> str:
        """``kvmix``, or as the paper calls what its 32 layers come to."""
        for bits, share in (("k2.19v2.38", 0.2), ("k2.28v2.56", 0.3)):
            if self == Kvmix(share=share):
                return f"kvmix-{bits}"
        return "kvmix"

    @property
    def _base(self) -> Kivi:
        return Kivi(4, self.group, self.residual)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """More bits for the top ``share`` of the layers, rounded down, by keys and by values."""
        importance = means(run.importance("importance"))
        return self._mixed(layer_shapes(run), importance)

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """See `Recipe.sized`: as if the first layers were the important ones."""
        return self._mixed(shapes, dict.fromkeys(product(shapes, STORED), 1.0))

    def _mixed(self, shapes: Mapping[str, Shape], importance: Mapping[Name, float]) -> Plan:
        # The product may lie just below a whole number.
        count = math.floor(self.share * len(shapes) + 1e-9)
        best = {
            kind: sorted(shapes, key=lambda path: -importance[path, kind])[:count]
            for kind in STORED
        }
        layers = {}
        for path, (_, key_dim, value_dim) in shapes.items():
            plan = self._base.layer_plan(path, key_dim, value_dim)
            important = [path in best[kind] for kind in STORED]
            keys = self.more_key_bits if important[0] else self.key_bits
            values = self.more_value_bits if important[1] else self.value_bits
            layers[path] = replace(
                plan,
                keys=self._stored(plan.keys, keys, important[0]),
                values=self._stored(plan.values, values, important[1]),
            )
            layers[path].check(path, key_dim, value_dim)
        unknown = replace(self._base.layer_plan("*", 128, 128).values, codec=Codec(4, "token", 32))
        return Plan(LayerPlan(unknown, unknown), layers, self.name)

    def _stored(self, plan: TensorPlan, bits: int, important: bool) -> TensorPlan:
        codec, retention = plan.codec, plan.retention
        pack11 = bits == 3 and self.packing == "11-per-int32"
        if self.exact != "window":
            ratio: Any = {self.exact: self.more_ratio if important else self.ratio}
            retention = RetentionPolicy(pack_every=codec.group, **ratio)
        return TensorPlan(replace(codec, bits=bits, pack11=pack11), retention)
