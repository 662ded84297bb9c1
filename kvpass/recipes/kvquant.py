"""KVQuant: keys before RoPE, codebooks by sensitivity, outliers apart (Hooper et al., 2024)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvpass.calibration.codebook import CodebookSamples
from kvpass.calibration.samples import (
    STORED,
    AttentionSample,
    CalibrationRunner,
    GradientSample,
    Name,
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
        (plan,) = fit_together([self], run, seed)
        return plan

    def sized(self, shapes: Mapping[str, Shape]) -> Plan:
        """See `Recipe.sized`: ranges of zeros take as much room as calibrated ones."""
        layers = {}
        for path, shape in shapes.items():
            none = torch.zeros(shape[0], shape[1])
            layers[path] = self.layer(path, shape, none, none)
        return Plan(layers=layers, recipe=self.name)

    def plan_of(self, layers: Mapping[str, LayerPlan]) -> Plan:
        """A plan of these layers."""
        unknown = TensorPlan(Codec(self._bits("values"), "token", 128), self._retention)
        return Plan(LayerPlan(unknown, unknown), dict(layers), self.name)

    def layer(self, path: str, shape: Shape, low: Tensor, high: Tensor) -> LayerPlan:
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

    def with_codebook(self, plan: TensorPlan, samples: CodebookSamples, seed: int) -> TensorPlan:
        """``plan`` with the codebook of what was seen."""
        bits = int(plan.codec.bits)
        codebook = samples.codebook(bits, seed)
        shifted = bits == 2 if self.qnorm is None else self.qnorm
        qnorm = samples.qnorm(codebook) if shifted else None
        return replace(plan, codec=replace(plan.codec, codebook=codebook, qnorm=qnorm))


def fit_together(recipes: Sequence[Kvquant], run: CalibrationRunner, seed: int) -> list[Plan]:
    """What `Kvquant.fit` returns for each recipe, from as many passes as one of them needs."""
    fits = [_Fit(recipe, run.tokens(recipe.sinks)) for recipe in recipes]

    def observe(sample: AttentionSample) -> None:
        for fit in fits:
            fit.add_keys(sample)

    def observe_gradients(sample: GradientSample) -> None:
        for fit in with_codebooks:
            fit.add_gradients(sample)

    run(observe, "ranges of keys")
    for fit in fits:
        fit.take_ranges()
    if with_codebooks := [fit for fit in fits if not fit.recipe.uniform]:
        run.gradients(observe_gradients, "sensitivities")
        for fit in with_codebooks:
            fit.take_codebooks(seed)
    return [fit.recipe.plan_of(fit.layers) for fit in fits]


class _Fit:
    """One recipe's calibration, pass by pass.

    Attributes:
        recipe: whose.
        layers: their plans, as far as they are known.
    """

    def __init__(self, recipe: Kvquant, tokens: int) -> None:
        self.recipe = recipe
        self.layers: dict[str, LayerPlan] = {}
        new = partial(Thresholds, recipe.outliers, tokens, recipe.sinks)
        self._thresholds: defaultdict[str, Thresholds] = defaultdict(new)
        self._shapes: dict[str, Shape] = {}
        self._samples: defaultdict[Name, CodebookSamples] = defaultdict(CodebookSamples)

    def add_keys(self, sample: AttentionSample) -> None:
        """First pass."""
        self._shapes[sample.layer] = sample.shape
        keys = sample.stored("keys", self.recipe.before_rope)
        self._thresholds[sample.layer].add(keys)

    def take_ranges(self) -> None:
        """Codes are evenly spaced then."""
        for path, shape in self._shapes.items():
            bounds = self._thresholds[path].bounds()
            self.layers[path] = self.recipe.layer(path, shape, *bounds)

    def add_gradients(self, sample: GradientSample) -> None:
        """Second pass."""
        if sample.kind == ("keys" if self.recipe.before_rope else "before_rope"):
            return
        plan, _, ranges = self.layers[sample.layer].stored(sample.stored)
        x, gradient = (t[:, :, self.recipe.sinks :] for t in (sample.x, sample.gradient))
        if x.shape[2]:
            qparams = None if ranges is None else ranges.tensor(x.device)
            normal, inside = normalized(plan.codec, x, qparams)
            weights = gradient.float().square()
            self._samples[sample.layer, sample.stored].add(normal, weights, inside)

    def take_codebooks(self, seed: int) -> None:
        """Codes stand for what was seen."""
        for path, layer in self.layers.items():
            keys = self.recipe.with_codebook(layer.keys, self._samples[path, "keys"], seed)
            values = self.recipe.with_codebook(layer.values, self._samples[path, "values"], seed)
            self.layers[path] = replace(layer, keys=keys, values=values)
