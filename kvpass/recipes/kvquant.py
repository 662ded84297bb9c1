"""KVQuant: keys before RoPE, codebooks by sensitivity, outliers apart (Hooper et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpass.calibration.codebook import CodebookSamples
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
    GradientSample,
    Shape,
    Stored,
)
from kvpass.calibration.thresholds import Thresholds
from kvpass.errors import OptionError, check, check_choice, check_flag, is_number, shown
from kvpass.format.channels import ChannelRanges
from kvpass.format.codec import Codec
from kvpass.format.groups import Axis
from kvpass.format.quantize import normalized, static_qparams
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import CalibratedRecipe


@dataclass(frozen=True)
class Kvquant(CalibratedRecipe):
    """Keys per channel, with calibrated ranges; values per token, all heads together.

    The paper keeps the first token exact and no recent ones: ``sinks=1, window=0``.

    Attributes:
        bits: per code of keys and of values: 2, 3 or 4.
        outliers: fraction of the elements of each token that are stored as they are, e.g. 0.01.
        uniform: the codes stand for evenly spaced values, not for those of a codebook.
        before_rope: keys are stored before their rotary embedding.
        qnorm: codebooks are shifted and scaled in decoding, so that mean and deviation stay. None:
            those of 2 bits.
        sinks: tokens that stay exact, the first ones; calibration leaves them out.
        window: tokens that stay exact, the last ones.
        key_bits, value_bits: of keys, of values alone; None: ``bits``.
    """

    bits: int = 3
    outliers: float = 0.0
    uniform: bool = False
    before_rope: bool = True
    qnorm: bool | None = None
    sinks: int = 5
    window: int = 128
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (2, 3, 4))
        for name in ("key_bits", "value_bits"):
            check_choice(name, getattr(self, name), (None, 2, 3, 4))
        fits = is_number(self.outliers) and 0 <= self.outliers < 0.5
        check("outliers", self.outliers, fits, "a fraction of at least 0, below 0.5, e.g. 0.01")
        for name in ("uniform", "before_rope"):
            check_flag(name, getattr(self, name))
        if self.qnorm not in (True, False, None) or (self.qnorm and self.uniform):
            raise OptionError(
                f"qnorm={shown(self.qnorm)} is not supported with uniform={self.uniform}; allowed: "
                "None, False, and True without uniform."
            )
        # Checks window and sinks.
        _ = self._retention

    @property
    def name(self) -> str:
        """E.g. ``kvquant-nuq3-1%``; with other values than keys ``kvquant-nuq-k4v3``."""
        kind = "int" if self.uniform else "nuq"
        outliers = f"-{100 * self.outliers:g}%" if self.outliers else ""
        keys, values = map(self._bits, STORED)
        bits = str(keys) if keys == values else f"-k{keys}v{values}"
        return f"kvquant-{kind}{bits}{outliers}"

    def _bits(self, kind: Stored) -> int:
        return (self.key_bits if kind == "keys" else self.value_bits) or self.bits

    @property
    def _retention(self) -> RetentionPolicy:
        return RetentionPolicy(self.window, 1, self.sinks)

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Ranges of keys, then codebooks of keys and values from the gradients."""
        plans = self._ranged(run)
        if not self.uniform:
            plans = self._with_codebooks(plans, run, seed)
        unknown = TensorPlan(Codec(self._bits("values"), "token", 128), self._retention)
        return Plan(LayerPlan(unknown, unknown), plans, self.name)

    def _ranged(self, run: CalibrationRunner) -> dict[str, LayerPlan]:
        """Plans with evenly spaced codes, and calibrated ranges of keys."""
        thresholds: dict[str, Thresholds] = {}
        shapes: dict[str, Shape] = {}

        def observe(sample: AttentionSample) -> None:
            if sample.layer not in thresholds:
                tokens = run.tokens(self.sinks)
                thresholds[sample.layer] = Thresholds(self.outliers, tokens, self.sinks)
                shapes[sample.layer] = sample.shape
            thresholds[sample.layer].add(sample.stored("keys", self.before_rope))

        run(observe, "ranges of keys")
        return {
            layer: self._layer(layer, shape, *thresholds[layer].bounds())
            for layer, shape in shapes.items()
        }

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """See `Recipe.sized`: ranges of zeros take as much room as calibrated ones."""
        layers = {}
        for path, shape in shapes.items():
            none = torch.zeros(shape[0], shape[1])
            layers[path] = self._layer(path, shape, none, none)
        return Plan(layers=layers, recipe=self.name)

    def _layer(self, path: str, shape: Shape, low: Tensor, high: Tensor) -> LayerPlan:
        """A layer's plan with evenly spaced codes; ``low`` and ``high`` ``[H, D]`` are the ranges
        of its keys."""
        heads, key_dim, value_dim = shape
        keys = self._tensor("keys", "channel", 0, heads * key_dim)
        values = self._tensor("values", "token", heads * value_dim, heads * value_dim)
        ranges = ChannelRanges.of(static_qparams(keys.codec, low, high))
        plan = LayerPlan(keys, values, None, None, self.before_rope, ranges)
        plan.check(path, key_dim, value_dim, heads)
        return plan

    def _tensor(self, kind: Stored, axis: Axis, group: int, elements: int) -> TensorPlan:
        """A plan with a codebook of evenly spaced values, which `fit` moves; none if ``uniform``.
        ``elements``: of each token."""
        outliers = 2 * math.ceil(self.outliers * elements / 2)
        bits = self._bits(kind)
        even = None if self.uniform else tuple(torch.linspace(-1, 1, 1 << bits).tolist())
        codec = Codec(bits, axis, group, outliers=outliers, codebook=even)
        return TensorPlan(codec, self._retention)

    def _with_codebooks(
        self, plans: dict[str, LayerPlan], run: CalibrationRunner, seed: int
    ) -> dict[str, LayerPlan]:
        samples = {(layer, kind): CodebookSamples() for layer in plans for kind in STORED}

        def observe(sample: GradientSample) -> None:
            if sample.kind == ("keys" if self.before_rope else "before_rope"):
                return
            plan, _, ranges = plans[sample.layer].stored(sample.stored)
            x, gradient = (t[:, :, self.sinks :] for t in (sample.x, sample.gradient))
            if x.shape[2]:
                qparams = None if ranges is None else ranges.tensor(x.device)
                normal, inside = normalized(plan.codec, x, qparams)
                weights = gradient.float().square()
                samples[sample.layer, sample.stored].add(normal, weights, inside)

        run.gradients(observe, "sensitivities")

        def calibrated(plan: TensorPlan, samples: CodebookSamples) -> TensorPlan:
            bits = int(plan.codec.bits)
            codebook = samples.codebook(bits, seed)
            shifted = bits == 2 if self.qnorm is None else self.qnorm
            qnorm = samples.qnorm(codebook) if shifted else None
            return replace(plan, codec=replace(plan.codec, codebook=codebook, qnorm=qnorm))

        return {
            layer: replace(
                plan,
                keys=calibrated(plan.keys, samples[layer, "keys"]),
                values=calibrated(plan.values, samples[layer, "values"]),
            )
            for layer, plan in plans.items()
        }
