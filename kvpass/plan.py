"""`LayerPlan` and `Plan`: how every cache tensor of a model is stored. Saved without pickle."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvpass.errors import PlanError, check_choice, cut, shown, shown_path
from kvpass.fingerprint import Weights
from kvpass.format.channels import ChannelBasis, ChannelOrder, ChannelRanges, ChannelRotation
from kvpass.format.codec import Codec
from kvpass.format.parse import modern_words, parse_plan
from kvpass.format.ranks import Ranks
from kvpass.format.retention import RetentionPolicy
from kvpass.format.tensor_plan import TensorPlan

FORMAT = 1
PLAIN = TensorPlan()
# The fields of a layer's plan that are saved as tensors, by their names in a file.
_SAVED: dict[str, tuple[str, Any]] = {
    "key_order": ("key_basis", ChannelOrder),
    "key_rotation": ("key_basis", ChannelRotation),
    "value_order": ("value_basis", ChannelOrder),
    "value_rotation": ("value_basis", ChannelRotation),
    "key_ranges": ("key_ranges", ChannelRanges),
}
# Kinds of layers in what is printed of a plan.
_KINDS_SHOWN = 3


@dataclass(frozen=True, repr=False)
class LayerPlan:
    """The storage of the keys and the values of one attention layer.

    Attributes:
        keys, values: codec and retention.
        key_basis, value_basis: how the cache holds the channels of each KV head: in an order, made
            with `ChannelOrder.of`, or rotated, by `ChannelRotation.of`; None: as the model does.
        before_rope: keys are stored before their rotary embedding, if they have one.
        key_ranges: the calibrated ranges of a codec of keys that has such.
    """

    keys: TensorPlan = PLAIN
    values: TensorPlan = PLAIN
    key_basis: ChannelBasis | None = None
    value_basis: ChannelBasis | None = None
    before_rope: bool = False
    key_ranges: ChannelRanges | None = None

    def __repr__(self) -> str:
        more = [f.name for f in fields(self)[2:] if getattr(self, f.name)]
        parts = [f"keys='{self.keys.summary()}'", f"values='{self.values.summary()}'", *more]
        return f"LayerPlan({', '.join(parts)})"

    def stored(self, kind: str) -> tuple[TensorPlan, ChannelBasis | None, ChannelRanges | None]:
        """The plan, the basis and the ranges of the ``keys``, or of the ``values``."""
        if kind == "keys":
            return self.keys, self.key_basis, self.key_ranges
        return self.values, self.value_basis, None

    def with_(self, *, qnorm: bool | None = None, **retention: int | None) -> LayerPlan:
        """See `Plan.with_`; ``retention`` are `RetentionPolicy`'s ``window`` and ``sinks``."""
        kept: dict[str, Any] = {n: x for n, x in retention.items() if x is not None}
        if self.key_ranges is not None and kept.get("sinks", self.keys.sinks) < self.keys.sinks:
            raise PlanError(
                f"sinks={kept['sinks']} needs calibration: the plan's ranges of keys leave out the "
                f"first {self.keys.sinks} tokens."
            )

        def changed(plan: TensorPlan) -> TensorPlan:
            if plan.codec.identity:
                return plan
            plan.one_codec()
            if qnorm and plan.codec.codebook is not None and plan.codec.qnorm is None:
                raise PlanError("qnorm=True needs calibration: the plan has no numbers for it.")
            codec = replace(plan.codec, qnorm=None) if qnorm is False else plan.codec
            return replace(plan, codec=codec, retention=replace(plan.retention, **kept))

        return replace(self, keys=changed(self.keys), values=changed(self.values))

    def of_rank(self, ranks: Ranks, key_dim: int, value_dim: int, kv_heads: int) -> LayerPlan:
        """What this plan of all heads says of the ``kv_heads`` of one of ``ranks``. What is for
        another number of heads stays as it is, and `check` refuses it."""

        def own(plan: TensorPlan, dim: int) -> TensorPlan:
            codec = plan.codec.of_rank(ranks, dim, kv_heads)
            return plan if codec == plan.codec else replace(plan, codec=codec)

        numbers = {n: getattr(self, n) for n in ("key_basis", "value_basis", "key_ranges")}
        owned = {n: x.of_rank(ranks, kv_heads) for n, x in numbers.items() if x is not None}
        keys, values = own(self.keys, key_dim), own(self.values, value_dim)
        return replace(self, keys=keys, values=values, **owned)

    def check(self, layer: str, key_dim: int, value_dim: int, kv_heads: int | None = None) -> None:
        """Refuses a plan that does not fit ``kv_heads`` (None: any number) of so many channels.

        Raises:
            PlanError: if this is one.
        """
        for kind, dim in (("keys", key_dim), ("values", value_dim)):
            plan, basis, _ = self.stored(kind)
            if basis is not None and (problem := basis.unsupported_reason(kv_heads, dim)):
                raise PlanError(
                    f"The {basis.word} of the {kind} of layer '{layer}': it is {problem}."
                )
            problems = (codec.unsupported_reason(dim, kv_heads) for codec in plan.codecs)
            if problem := next(filter(None, problems), None):
                codec = plan.summary().split("/")[0]
                raise PlanError(
                    f"The {kind} of layer '{layer}' cannot be stored as {codec}: {problem}."
                )
        if problem := self.keys.unsupported_pair(self.values):
            raise PlanError(f"Layer '{layer}': {problem}.")
        if self.before_rope and not self.keys.takes_rope:
            raise PlanError(f"Layer '{layer}': keys {self.keys} cannot be stored before RoPE.")
        self._check_ranges(layer, key_dim, kv_heads)

    def _check_ranges(self, layer: str, key_dim: int, kv_heads: int | None) -> None:
        if self.values.codec.static_ranges or self.keys.codec.static_ranges != (
            self.key_ranges is not None
        ):
            raise PlanError(
                f"Layer '{layer}': the keys of a codec with calibrated ranges need those ranges, "
                "other keys and values have none."
            )
        if self.before_rope and self.key_basis is not None:
            raise PlanError(f"Layer '{layer}': keys before RoPE stay in the model's basis.")
        if self.key_ranges is not None:
            problem = self.key_ranges.unsupported_reason(kv_heads, key_dim)
            found, needed = self.key_ranges.dtype, self.keys.codec.qparam_dtype
            if problem is None and f"torch.{found}" != str(needed):
                problem = f"{found}, the codec needs {needed}"
            if problem is not None:
                raise PlanError(f"The ranges of the keys of layer '{layer}': they are {problem}.")

    def unknown(self, layer: str, dim: int) -> TensorPlan:
        """The plan of a cache tensor of ``dim`` channels that no known attention reads as keys or
        as values, such as the latents of multi-head latent attention.

        Per token, as the values are, which is sound whatever the tensor means: keys per channel
        rely on the outlier channels of keys. With at least 4 bits, since it may serve as keys, and
        keys per token keep their accuracy with 4 bits but not with 2 (KIVI, table 2). Groups are
        the largest part of the values' that divides ``dim``; scales are half and nothing is
        clipped, which is chosen for values.

        Raises:
            PlanError: if ``dim`` channels cannot be stored so.
        """
        values = self.values.uniform
        codec = values.codec
        # Some attentions have keys only; what is of no channels has no bits.
        if codec.identity or dim == 0:
            return PLAIN
        group = math.gcd(codec.group if codec.axis == "token" else 32, dim)
        if group < 2:
            raise PlanError(f"The cache of layer '{layer}' has {dim} channels: no group fits.")
        plan = TensorPlan(Codec(max(codec.bits, 4), "token", group), values.retention)
        if problem := plan.codec.unsupported_reason(dim):
            raise PlanError(
                f"The cache of layer '{layer}' cannot be stored as {plan.codec}: {problem}."
            )
        return plan


class Planner(Protocol):
    """A `Plan` or a recipe: it says how a layer is stored."""

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """See `Plan.layer_plan`."""

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """See `LayerPlan.unknown`."""

    def warning(self, query_heads: int, kv_heads: int) -> str | None:
        """Why a layer with these heads may lose accuracy, or None."""


@dataclass(frozen=True)
class Calibration:
    """The origin of a calibrated plan.

    Attributes:
        seed: the seed of all random numbers.
        tokens: the number of tokens that the model has read.
        weights: see `kvpass.fingerprint`.
        versions: the versions of libraries.
    """

    seed: int
    tokens: int
    weights: Weights
    versions: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class Plan:
    """A plan for a model: one `LayerPlan` for all layers, and exceptions.

    Attributes:
        default: for every layer that ``layers`` does not name.
        layers: by the attention module's path, e.g. ``model.layers.0.self_attn``, or by the number
            of the layer in it, e.g. ``0``.
        recipe: the name of the recipe that made it.
        calibration: the origin of a plan that is made from texts, which names all layers.
    """

    default: LayerPlan = LayerPlan()
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    recipe: str = "custom"
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        """One line: kinds of layers are counted, not listed."""
        kinds = Counter(map(repr, self.layers.values()))
        shown_kinds = [f"{count} x {kind}" for kind, count in kinds.most_common(_KINDS_SHOWN)]
        if len(kinds) > _KINDS_SHOWN:
            shown_kinds.append(f"{len(kinds) - _KINDS_SHOWN} more kinds of layers")
        parts = [f"recipe='{self.recipe}'", f"default={self.default!r}", *shown_kinds]
        if self.calibration is not None:
            parts.append(f"calibrated on {self.calibration.tokens} tokens")
        return f"Plan({', '.join(parts)})"

    def layer(self, path: str) -> LayerPlan:
        """The plan of the layer at ``path``."""
        named = (self.layers[name] for name in (path, *path.split(".")) if name in self.layers)
        return next(named, self.default)

    def layer_at(self, index: int) -> LayerPlan:
        """The plan of the layer with this number in its path."""
        named = (p for name, p in self.layers.items() if str(index) in name.split("."))
        return next(named, self.default)

    def layer_plan(self, path: str, key_dim: int, value_dim: int) -> LayerPlan:
        """The plan of the layer at ``path``, checked against its head dimensions.

        Raises:
            PlanError: if it does not fit.
        """
        if self.calibration is not None and path not in self.layers:
            known = ", ".join(list(self.layers)[:2])
            raise PlanError(
                f"The plan is calibrated for another model: it has no layer '{path}', but {known} "
                "... Use kvpass.calibrate on this model."
            )
        plan = self.layer(path)
        plan.check(path, key_dim, value_dim)
        return plan

    def unknown_plan(self, path: str, dim: int) -> TensorPlan:
        """See `LayerPlan.unknown`."""
        return self.layer(path).unknown(path, dim)

    def warning(self, query_heads: int, kv_heads: int) -> str | None:
        """None: whoever made the plan has been warned."""
        return None

    def with_(
        self, *, window: int | None = None, sinks: int | None = None, qnorm: bool | None = None
    ) -> Plan:
        """This plan with fields replaced that need no calibration anew, in all layers.

        Args:
            window, sinks: tokens that stay exact, the last and the first ones; keys that are packed
                in runs, as KIVI's, keep up to a run more.
            qnorm: False: codebooks are decoded as they are (KVQuant, section 3.5).

        Raises:
            OptionError: if a value is not allowed.
            PlanError: if it needs calibration: fewer sinks than calibrated ranges of keys have left
                out, or Q-Norm of codebooks that have none.
        """
        check_choice("qnorm", qnorm, (None, True, False))
        # Checks both, also where all layers store tokens as they are.
        _ = RetentionPolicy(window or 0, 1, sinks or 0)
        change = partial(LayerPlan.with_, window=window, sinks=sinks, qnorm=qnorm)
        layers = {name: change(layer) for name, layer in self.layers.items()}
        return replace(self, default=change(self.default), layers=layers)

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file whose JSON header holds the plan."""
        tensors: dict[str, Tensor] = {}
        header: dict[str, Any] = {
            "format": FORMAT,
            "recipe": self.recipe,
            "default": _layer_json(self.default, "default", tensors),
            "layers": {n: _layer_json(x, f"layers/{n}", tensors) for n, x in self.layers.items()},
        }
        if self.calibration is not None:
            header["calibration"] = asdict(self.calibration)
        save_file(tensors, str(path), metadata={"kvpass": json.dumps(header)})

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads what `save` wrote.

        Raises:
            PlanError: if the file is missing, damaged, or of another format.
        """
        name = shown_path(path)
        problems = (
            SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError,
            # Numbers that are infinite, and brackets in brackets, both of which JSON allows.
            OverflowError, RecursionError,
        )  # fmt: skip
        try:
            with safe_open(str(path), framework="pt") as file:
                header = json.loads((file.metadata() or {})["kvpass"])
                if (found := header["format"]) == FORMAT:
                    layers = {n: _layer_plan(x, file) for n, x in header["layers"].items()}
                    default = _layer_plan(header["default"], file)
                    calibration = _calibration(header.get("calibration"))
                    return Plan(default, layers, str(header["recipe"]), calibration)
        except FileNotFoundError:
            raise PlanError(f"Plan file {name} does not exist.") from None
        except problems as error:
            reason = cut(f"{type(error).__name__}: {error}").rstrip(".")
            raise PlanError(f"Plan file {name} is not a kvpass plan: {reason}.") from None
        raise PlanError(f"Plan file {name} has format {shown(found)}; this version reads {FORMAT}.")


def _layer_json(plan: LayerPlan, name: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """The header of a layer, whose bases and ranges join ``tensors``."""
    header = {"keys": str(plan.keys), "values": str(plan.values)}
    if plan.before_rope:
        header["before_rope"] = "yes"
    for kind, (attribute, saved) in _SAVED.items():
        if isinstance(data := getattr(plan, attribute), saved):
            header[kind] = f"{name}/{kind}"
            tensors[header[kind]] = data.tensor().clone()
    return header


def _calibration(header: Mapping[str, Any] | None) -> Calibration | None:
    if header is None:
        return None
    weights = {str(n): tuple(float(x) for x in values) for n, values in header["weights"].items()}
    versions = {str(name): str(version) for name, version in header["versions"].items()}
    return Calibration(int(header["seed"]), int(header["tokens"]), weights, versions)


def _layer_plan(header: Mapping[str, Any], file: Any) -> LayerPlan:
    keys, values = (parse_plan(modern_words(header[kind])) for kind in ("keys", "values"))
    saved = {f: t.of(file.get_tensor(header[k])) for k, (f, t) in _SAVED.items() if k in header}
    return LayerPlan(keys, values, before_rope="before_rope" in header, **saved)
