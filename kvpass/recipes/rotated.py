"""Rotated: no channel stands out (QuaRot, Ashkboos et al., 2024; OSCAR, arXiv 2605.17757)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from kvpass.calibration.clipping import ClipSearch
from kvpass.calibration.levels import gaussian_levels
from kvpass.calibration.rotations import RotationSearch
from kvpass.calibration.samples import AttentionSample, CalibrationRunner
from kvpass.errors import OptionError, PlanError, check, check_choice, check_flag
from kvpass.format.channels import ChannelRotation
from kvpass.format.codec import Codec
from kvpass.format.groups import Axis
from kvpass.format.hadamard import hadamard
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan
from kvpass.plan import LayerPlan, Plan
from kvpass.recipes.base import Recipe, calibration_needed

Rotation = Literal["hadamard", "eigen", False]
_BITS = (2, 3, 4, 8)
# Of the Hadamard matrix's signs, the same for all models.
_SIGNS = 0


@dataclass(frozen=True)
class Rotated(Recipe):
    """Keys and values behind rotations of each head's channels.

    Attributes:
        key_bits, value_bits: 2, 3, 4 or 8.
        key_axis: what keys have in common that share a scale: their ``channel``, as in KIVI, or
            their ``token``, as values always.
        group: tokens of a channel, or channels of a token, that share a scale. None: 32, or 64 with
            2 bits; per token the largest divisor of that which divides the head dimension, with
            ``levels`` a head.
        key_rotation, value_rotation: ``hadamard``: a Hadamard matrix with random signs, the same
            for all heads. ``eigen``: calibrated for each head, see `RotationSearch`. False: none.
        clip: the factor for the ends of ranges per token. True: searched for every group of every
            head (SKVQ, eq. 3).
        levels: codes per token stand for the Lloyd-Max levels of Gaussian groups, not for evenly
            spaced values; with ``clip=False``, 2, 3 or 4 bits, and groups of a head at least.
        window: tokens that stay exact, the last ones.
        sinks: tokens that stay exact, the first ones.
        fp8: scales and minima are fp8-e4m3 instead of half.
        before_rope: keys are stored before their rotary embedding, where a bias of their projection
            moves the ranges of channels, but does not widen them. ``key_rotation`` is False, and
            keys' scales and minima are half, as ranges are far from 0 then.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_axis: Axis = "channel"
    group: int | None = None
    key_rotation: Rotation = False
    value_rotation: Rotation = "hadamard"
    clip: bool | float = False
    levels: bool = False
    window: int = 128
    sinks: int = 5
    fp8: bool = True
    before_rope: bool = False

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            check_choice(name, getattr(self, name), _BITS)
        check_choice("key_axis", self.key_axis, ("channel", "token"))
        for name in ("key_rotation", "value_rotation"):
            check_choice(name, getattr(self, name), get_args(Rotation))
        fits = isinstance(self.clip, bool | int | float) and 0 <= self.clip <= 1
        check("clip", self.clip, fits, "True (searched), False, or a number above 0, at most 1")
        for name in ("levels", "fp8", "before_rope"):
            check_flag(name, getattr(self, name))
        if self.before_rope and self.key_rotation:
            raise OptionError(
                f"key_rotation={self.key_rotation!r} is not supported with before_rope=True; "
                "allowed: False."
            )
        if self.levels and (self.clip is not False or 8 in (self.key_bits, self.value_bits)):
            raise OptionError(
                f"levels=True is not supported with clip={self.clip} and {self.key_bits} and "
                f"{self.value_bits} bits; allowed: clip=False, and 2, 3 or 4 bits."
            )
        # Bad combinations should be reported before any graph is compiled.
        self._tensor(self.key_bits, self.key_axis, self.group or 128)
        _ = self._unknown

    @property
    def name(self) -> str:
        """E.g. ``rotated-k4v2``, or ``rotated-4bit``."""
        same = self.key_bits == self.value_bits
        return (
            f"rotated-{self.key_bits}bit" if same else f"rotated-k{self.key_bits}v{self.value_bits}"
        )

    @property
    def calibrated(self) -> bool:
        """Eigenvectors and searched factors come from texts."""
        return self.clip is True or "eigen" in (self.key_rotation, self.value_rotation)

    def _tensor(self, bits: int, axis: Axis, dim: int) -> TensorPlan:
        group = self.group or (64 if bits == 2 else 32)
        if axis == "token" and self.group is None:
            group = dim if self.levels else math.gcd(group, dim)
        more: dict[str, Any] = {"qparams": "fp8" if self.fp8 else "half"}
        if axis == "token" and self.levels:
            if group < dim:
                raise PlanError(
                    f"levels=True is not supported with groups of {group} of a head's {dim} "
                    "channels; allowed: groups of a head or more."
                )
            more["codebook"] = gaussian_levels(bits, group)
        elif axis == "token" and self.clip and self.clip is not True:
            more["clip"] = float(self.clip)
        every = group if axis == "channel" else 1
        codec = Codec(bits, axis, group, **more)
        return TensorPlan(codec, RetentionPolicy(self.window, every, self.sinks))

    @property
    def _unknown(self) -> TensorPlan:
        """The storage of what is neither keys nor values, but for its group."""
        return self._tensor(self.value_bits, "token", self.group or 128)

    def start(
        self, layer: str, key_dim: int, value_dim: int, heads: int | None = None
    ) -> LayerPlan:
        """See `Recipe.start`: rotations and factors of clipping take no room."""
        keys = self._tensor(self.key_bits, self.key_axis, key_dim)
        if self.before_rope:
            keys = replace(keys, codec=replace(keys.codec, qparams="half"))
        values = self._tensor(self.value_bits, "token", value_dim)
        plan = LayerPlan(keys, values, before_rope=self.before_rope)
        if self.key_rotation == "hadamard":
            plan = replace(plan, key_basis=_signed(key_dim))
        if self.value_rotation == "hadamard":
            plan = replace(plan, value_basis=_signed(value_dim))
        plan.check(layer, key_dim, value_dim, heads)
        return plan

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan without calibration; a `PlanError` if the options need one."""
        if self.calibrated:
            raise calibration_needed(self.name, ", or set clip=False and no 'eigen' rotation")
        return self.start(path, key_dim, value_dim)

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """As values, not rotated."""
        return LayerPlan(values=self._unknown).unknown(path, dim)

    def warning(self, query_heads: int, kv_heads: int) -> str | None:
        """KIVI, section 4.2.1: multi-query attention needs 4 bits."""
        if kv_heads == 1 and query_heads > 1 and self.key_bits < 4:
            return (
                f"{self.name} loses accuracy with one KV head (multi-query): its keys need 4 bits"
            )
        return None

    def fit(self, run: CalibrationRunner, seed: int) -> Plan:
        """Rotations from moments, then factors of clipping from attention outputs."""
        searches: dict[str, RotationSearch] = {}

        def observe(sample: AttentionSample) -> None:
            layer = sample.layer
            if layer not in searches:
                heads, key_dim, value_dim = sample.shape
                searches[layer] = RotationSearch(self.start(layer, key_dim, value_dim, heads))
            searches[layer].add(sample)

        run(observe, "moments of channels")
        plans = {layer: self._rotated(search) for layer, search in searches.items()}
        if self.clip is True:
            clips = {x: ClipSearch(plan, seed + i) for i, (x, plan) in enumerate(plans.items())}
            run(lambda sample: clips[sample.layer].add(sample), "clipping")
            plans = {layer: search.clipped() for layer, search in clips.items()}
        return Plan(LayerPlan(self._unknown, self._unknown), plans, self.name)

    def _rotated(self, search: RotationSearch) -> LayerPlan:
        plan = search.plan
        if self.key_rotation == "eigen":
            plan = replace(plan, key_basis=search.rotation("keys"))
        if self.value_rotation == "eigen":
            plan = replace(plan, value_basis=search.rotation("values"))
        return plan


def _signed(dim: int) -> ChannelRotation:
    return ChannelRotation.of(hadamard(dim, _SIGNS).unsqueeze(0))
