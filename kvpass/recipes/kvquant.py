"""KVQuant: keys before RoPE, levels by sensitivity, outliers apart (Hooper et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kvpass.calibration.codebook import CodebookSamples
from kvpass.calibration.samples import AttentionSample, CalibrationRunner, GradientSample
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError, shown
from kvpass.format.codec import Codec
from kvpass.format.quantize import normalized, offline_params
from kvpass.format.ranges import ChannelRanges
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import CalibratedRecipe

_BITS = (2, 3, 4)


@dataclass(frozen=True)
class Kvquant(CalibratedRecipe):
    """Keys per channel, with calibrated ranges; values per token, all heads together.

    Attributes:
        bits: of a code: 2, 3 or 4.
        outliers: fraction of the elements of each token that are stored as they are, e.g. 0.01.
        uniform: levels are evenly spaced, not chosen by sensitivity.
        before_rope: keys are stored before their rotary embedding.
        qnorm: levels are shifted and scaled when they are decoded, so that their moments stay.
            None: at 2 bits.
        sinks: tokens that stay exact, the first ones; calibration leaves them out.
        window: tokens that stay exact, the last ones.
    """

    bits: int = 3
    outliers: float = 0.0
    uniform: bool = False
    before_rope: bool = True
    qnorm: bool | None = None
    sinks: int = 1
    window: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _BITS or type(self.bits) is not int:
            raise OptionError(f"bits={shown(self.bits)} is not supported; allowed: 2, 3, 4.")
        fraction = isinstance(self.outliers, int | float) and not isinstance(self.outliers, bool)
        if not fraction or not 0 <= self.outliers < 0.5:
            raise OptionError(
                f"outliers={shown(self.outliers)} is not supported; allowed: a fraction of at "
                "least 0, below 0.5, e.g. 0.01."
            )
        for name in ("uniform", "before_rope"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name}={shown(value)} is not supported; allowed: True, False.")
        if self.qnorm not in (True, False, None) or (self.qnorm and self.uniform):
            raise OptionError(
                f"qnorm={shown(self.qnorm)} is not supported with uniform={self.uniform}; allowed: "
                "None, False, and True without uniform."
            )
        _ = self._retention

    @property
    def name(self) -> str:
        """E.g. ``kvquant-nuq3-1%``."""
        kind = "int" if self.uniform else "nuq"
        outliers = f"-{100 * self.outliers:g}%" if self.outliers else ""
        return f"kvquant-{kind}{self.bits}{outliers}"

    @property
    def _retention(self) -> RetentionPolicy:
        return RetentionPolicy(self.window, 1, self.sinks)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Ranges of keys, then levels of keys and values from the gradients."""
        plans = self._ranged(run)
        if not self.uniform:
            plans = self._levelled(plans, run, seed)
        unknown = TensorPlan(Codec(self.bits, "token", 128), self._retention)
        return Plan(LayerPlan(unknown, unknown), plans, self.name)

    def _ranged(self, run: CalibrationRunner) -> dict[str, LayerPlan]:
        """Evenly spaced levels between the ends of ranges."""
        found: dict[str, Thresholds] = {}
        shapes: dict[str, tuple[int, int, int]] = {}

        def look(seen: AttentionSample) -> None:
            keys = seen.stored("keys", self.before_rope)
            shapes[seen.layer] = (keys.shape[1], keys.shape[3], seen.values.shape[3])
            if seen.layer not in found:
                tokens = run.tokens(self.sinks)
                found[seen.layer] = Thresholds(self.outliers, tokens, self.sinks)
            found[seen.layer].add(keys)

        run(look, "ranges of keys")
        plans = {}
        for layer, (heads, key_dim, value_dim) in shapes.items():
            keys = self._tensor("channel", 0, heads * key_dim)
            values = self._tensor("token", heads * value_dim, heads * value_dim)
            ranges = ChannelRanges.of(offline_params(keys.codec, *found[layer].ends()))
            plan = LayerPlan(keys, values, before_rope=self.before_rope, key_ranges=ranges)
            plan.check(layer, key_dim, value_dim, heads)
            plans[layer] = plan
        return plans

    def _tensor(self, axis: str, group: int, elements: int) -> TensorPlan:
        """With a table of evenly spaced levels, unless they are to stay so."""
        half = math.ceil(self.outliers * elements / 2)
        table = None if self.uniform else tuple(torch.linspace(-1, 1, 1 << self.bits).tolist())
        base = Codec(self.bits, "channel" if axis == "channel" else "token", group)
        return TensorPlan(replace(base, outliers=2 * half, codebook=table), self._retention)

    def _levelled(
        self, plans: dict[str, LayerPlan], run: CalibrationRunner, seed: int
    ) -> dict[str, LayerPlan]:
        levels = {
            (layer, kind): CodebookSamples() for layer in plans for kind in ("keys", "values")
        }
        keys = "before_rope" if self.before_rope else "keys"

        def look(seen: GradientSample) -> None:
            if seen.kind not in (keys, "values"):
                return
            plan, kind = plans[seen.layer], "values" if seen.kind == "values" else "keys"
            ranges = plan.key_ranges if kind == "keys" else None
            codec = plan.keys.codec if kind == "keys" else plan.values.codec
            x, gradient = (t[:, :, self.sinks :] for t in (seen.x, seen.gradient))
            if x.shape[2]:
                params = None if ranges is None else ranges.tensor(x.device)
                normal, inside = normalized(codec, x, params)
                levels[seen.layer, kind].add(normal, gradient.float().square(), inside)

        run.gradients(look, "sensitivities")
        return {
            layer: self._with_levels(plan, layer, levels, seed) for layer, plan in plans.items()
        }

    def _with_levels(
        self, plan: LayerPlan, layer: str, levels: dict[tuple[str, str], CodebookSamples], seed: int
    ) -> LayerPlan:
        shifted = self.bits == 2 if self.qnorm is None else self.qnorm
        tensors = []
        for kind, tensor in (("keys", plan.keys), ("values", plan.values)):
            known = levels[layer, kind]
            table = known.table(self.bits, seed)
            codec = replace(
                tensor.codec, codebook=table, qnorm=known.qnorm(table) if shifted else None
            )
            tensors.append(replace(tensor, codec=codec))
        return replace(plan, keys=tensors[0], values=tensors[1])
