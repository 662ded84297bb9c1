"""Tiny random models of every decoder family, shrunk from the defaults of their own configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from kvpass.bench.models import scale_matrices
from kvpass.errors import OptionError, unknown
from kvpass.zoo.sizes import LAYERS, NOT_DECODERS, OVERRIDES, SIZES, TOKENS


@cache
def family_names() -> tuple[str, ...]:
    """Model types of all decoders of text, multimodal models by their text part."""
    return tuple(sorted(set(_parents()) - set(NOT_DECODERS)))


def check_families(names: Sequence[str]) -> None:
    """Refuses what is no decoder of transformers, or none that the zoo can run.

    Raises:
        OptionError: if one of the names is not in `family_names`.
    """
    for name in names:
        if name in NOT_DECODERS:
            raise OptionError(f"The family {name!r} is not supported: {NOT_DECODERS[name]}.")
        if name not in family_names():
            raise OptionError(unknown("family", name, family_names()))


@cache
def _parents() -> dict[str, type]:
    """Per text model type the config class that transformers finds the model's class by."""
    found: dict[str, type] = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        for config in mapping.keys():  # noqa: SIM118 (iterating it gives something else)
            parts = config.sub_configs
            text = parts.get("text_config", parts.get("decoder", config))
            family = getattr(text, "model_type", "")
            if family not in CONFIG_MAPPING or CONFIG_MAPPING[family] is not text:
                continue
            if text in MODEL_FOR_CAUSAL_LM_MAPPING or text in MODEL_MAPPING:
                found[family] = text
            elif mapping is MODEL_FOR_CAUSAL_LM_MAPPING:
                found[family] = config
    return found


def tiny_config(family: str) -> Any:
    """The family's default config with small sizes, and one layer of each kind (two at least)."""
    defaults = CONFIG_MAPPING[family]().to_dict()
    small = {**_shrink_all(defaults), **TOKENS, **OVERRIDES.get(family, {})}
    if "is_decoder" in defaults:
        small["is_decoder"] = True
    if defaults.get("kv_lora_rank"):
        # Latent attention: every head has keys and values of its own.
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
    return CONFIG_MAPPING[family](**small)


def _shrink_all(defaults: Mapping[str, Any]) -> dict[str, Any]:
    layers = _shown_layers(defaults)
    found = {name: _shrink(name, value, defaults, layers) for name, value in defaults.items()}
    return {name: small for name, small in found.items() if small is not None}


def _shrink(name: str, value: Any, defaults: Mapping[str, Any], layers: list[int]) -> Any:
    """The small value of a field; None to leave it at its default."""
    if name in LAYERS:
        return len(layers)
    if isinstance(value, list):
        return _layer_list(name, value, _layer_count(defaults), layers)
    if isinstance(value, Mapping) and value:
        if name == "per_layer_config":
            return _per_layer(value, defaults, layers)
        if name.endswith("_config"):
            return _shrink_all(value)
        return _plain_rope(value, defaults) if name == "rope_parameters" else None
    if type(value) is int and value > 0 and name in SIZES:
        return min(value, SIZES[name])
    return None


def _layer_list(name: str, value: list[Any], count: int, layers: list[int]) -> list[Any] | None:
    """The rest of a list with an item per layer, or of a list of layers."""
    if _are_layers(value, count):
        return [new for new, old in enumerate(layers) if old in value]
    if len(value) != count:
        return None
    sizes = isinstance(value[0], int) and value[0] > 1 and name in SIZES
    return [SIZES[name] if sizes else value[layer] for layer in layers]


def _are_layers(value: list[Any], count: int) -> bool:
    """Whether a list is of the numbers of some layers, in order."""
    ordered = all(type(x) is int for x in value) and value == sorted(set(value))
    return ordered and len(value) > 1 and value[0] >= 0 and value[-1] < count


def _layer_count(defaults: Mapping[str, Any]) -> int:
    return next((int(defaults[name]) for name in LAYERS if defaults.get(name)), 2)


def _shown_layers(defaults: Mapping[str, Any]) -> list[int]:
    """The first layer of each kind; of a uniform model the first two."""
    count = _layer_count(defaults)
    lists = [v for v in defaults.values() if isinstance(v, list) and v]
    own = {int(i): v for i, v in (defaults.get("per_layer_config") or {}).items()}
    first: dict[str, int] = {}
    for layer in range(count):
        kind = [own.get(layer)]
        for items in lists:
            if _are_layers(items, count):
                kind.append(layer in items)
            elif len(items) == count:
                kind.append(items[layer])
        first.setdefault(repr(kind), layer)
    layers = sorted(first.values())
    return layers if len(layers) > 1 else list(range(min(2, count)))


def _per_layer(value: Mapping[str, Any], defaults: Mapping[str, Any], layers: list[int]) -> Any:
    """Exceptions of single layers, in the same proportion to the other layers as before."""
    return {
        str(layers.index(int(layer))): {
            name: SIZES[name] * size // defaults[name] for name, size in fields.items()
        }
        for layer, fields in value.items()
        if int(layer) in layers
    }


def _plain_rope(value: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    """Without scaling for long contexts, whose factors belong to the head dimension."""
    kinds = {name: _plain_rope(v, defaults) for name, v in value.items() if isinstance(v, Mapping)}
    if kinds:
        return {**value, **kinds}
    kept = ("rope_theta", "partial_rotary_factor", "mrope_interleaved")
    small = {"rope_type": "default"} | {k: value[k] for k in kept if k in value}
    if sections := value.get("mrope_section"):
        dim = defaults.get("head_dim") or defaults["hidden_size"] // defaults["num_attention_heads"]
        ends = [round(SIZES["head_dim"] / dim * end) for end in accumulate(sections)]
        small["mrope_section"] = [b - a for a, b in pairwise([0, *ends])]
    return small


def tiny_model(family: str, attention: str, seed: int = 0) -> Any:
    """A random model of the family in float32 and eval mode; ``attention`` is transformers' name of
    an implementation, e.g. ``sdpa``.

    Returns:
        A causal language model; of families that have none the decoder without its head.
    """
    config, parent = tiny_config(family), _parents()[family]
    causal = parent in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class: Any = (MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_MAPPING)[parent]
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation=attention)
    scale_matrices(model, 4.0)
    return model.float().eval()
