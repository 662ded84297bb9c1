"""KVmix: more bits for the layers on whose weights the loss depends most (Li et al., 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvpass.cache.codec import Codec
from kvpass.calibration.importance import means
from kvpass.calibration.seen import STORED, Pass, Stored, layer_dims, layer_shapes
from kvpass.errors import OptionError
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import CalibratedRecipe
from kvpass.recipes.kivi import Kivi

_BITS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Kvmix(CalibratedRecipe):
    """Keys per channel and values per token, as KIVI has them; bits by layer, of both apart.

    The layers with the largest gradients of ``W_k`` get more bits for their keys, those with the
    largest of ``W_v`` for their values (section 3.2).

    Attributes:
        key_bits, value_bits: of most layers.
        more_key_bits, more_value_bits: of the important ones.
        share: of the layers that are important.
        group: as KIVI's.
        residual: tokens that stay exact, as KIVI's.
    """

    key_bits: int = 2
    value_bits: int = 2
    more_key_bits: int = 3
    more_value_bits: int = 4
    share: float = 0.25
    group: int | None = None
    residual: int = 128

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits", "more_key_bits", "more_value_bits"):
            value = getattr(self, name)
            if type(value) is not int or value not in _BITS:
                raise OptionError(
                    f"{name}={value!r} is not supported; allowed: {', '.join(map(str, _BITS))}."
                )
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not number or not 0 <= self.share <= 1:
            raise OptionError(f"share={self.share!r} is not supported; allowed: from 0 to 1.")
        # Group and residual are KIVI's to check.
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

    def fit(self, run: Pass, seed: int) -> Plan:
        """The top ``share`` of the layers, rounded down, of keys and of values."""
        dims = layer_dims(layer_shapes(run))
        importance = means(run.importance("importance"))
        best = {kind: self._best(importance, kind, list(dims)) for kind in STORED}
        layers = {}
        for path, (key_dim, value_dim) in dims.items():
            plan = self._base.layer_plan(path, key_dim, value_dim)
            keys = self.more_key_bits if path in best["keys"] else self.key_bits
            values = self.more_value_bits if path in best["values"] else self.value_bits
            k, v = (replace(p.codec, bits=b) for p, b in ((plan.keys, keys), (plan.values, values)))
            layers[path] = replace(
                plan, keys=replace(plan.keys, codec=k), values=replace(plan.values, codec=v)
            )
            layers[path].check(path, key_dim, value_dim)
        unknown = replace(self._base.layer_plan("*", 128, 128).values, codec=Codec(4, "token", 32))
        return Plan(LayerPlan(unknown, unknown), layers, self.name)

    def _best(
        self, importance: dict[tuple[str, Stored], float], kind: Stored, layers: list[str]
    ) -> list[str]:
        ranked = sorted(layers, key=lambda layer: -importance[layer, kind])
        return ranked[: math.floor(self.share * len(layers) + 1e-9)]
