"""What each layer of a model caches, and what its weights are, without making either."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from kvpass.errors import OptionError, cut
from kvpass.format.shard import WHOLE, Shard

# Tokens of the prompt that shows the shapes.
_TOKENS = 4


@dataclass(frozen=True)
class LayerShape:
    """The keys ``[B, heads, T, key_dim]`` and the values ``[B, heads, T, value_dim]`` of a layer.

    Attributes:
        window: tokens that a sliding window leaves in the cache, None for all.
        latents: they are the latents of multi-head latent attention and its rotary keys.
        rope: channels of a head of keys that a rotary embedding rotates.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latents: bool = False
    rope: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        layers: those with keys and values, by their numbers; layers that read another one's are
            none.
        state_bytes: constant states of recurrent and linear attention layers, per sequence.
        query_heads: of each layer.
        weights: bytes of all weights.
        matrices: elements of weights that every step multiplies by.
        experts: elements of the weights of all experts, of which a token takes ``share``.
        itemsize: bytes of an element of weights.
    """

    layers: Mapping[int, LayerShape]
    state_bytes: int
    query_heads: int
    weights: int
    matrices: int
    experts: int
    share: float
    itemsize: int

    @property
    def largest_layer(self) -> int:
        """Elements of the keys and values of a token, in the layer that has most."""
        every = self.layers.values()
        return max(x.heads * (x.key_dim + x.value_dim) for x in every)

    def read_weights(self, batch: int) -> float:
        """Bytes of weights that a decode step reads: those of embeddings are not, those of experts
        as far as ``batch`` tokens choose them, each independently and evenly."""
        chosen = 1 - (1 - self.share) ** batch
        return self.itemsize * (self.matrices + chosen * self.experts)

    def flops(self, batch: int, tokens: int, shard: Shard = WHOLE) -> float:
        """Operations of a decode step at that context on a device with this part of it, those of
        recurrent states not counted."""
        found = 2.0 * batch * (self.matrices + self.share * self.experts)
        for layer in self.layers.values():
            kept = shard.own(tokens) if layer.window is None else min(tokens, layer.window)
            found += 2.0 * batch * self.query_heads * kept * (layer.key_dim + layer.value_dim)
        return found


def model_shape(config: Any, dtype: torch.dtype) -> ModelShape:
    """The shape of a model whose weights have ``dtype``: it runs on the meta device.

    Raises:
        OptionError: if it cannot run there, caches something that is not understood, or no keys
            and values at all.
    """
    family = config.model_type
    try:
        model = _on_meta(config, dtype)
        cache = DynamicCache(config=model.config)
        # Purely recurrent models have another name for it.
        known = signature(model.forward).parameters
        name = "cache_params" if "cache_params" in known else "past_key_values"
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        with torch.no_grad(), torch.device("meta"):
            model(input_ids=ids, use_cache=True, **{name: cache})
    except Exception as error:
        reason = cut(f"{type(error).__name__}: {error}").rstrip(".")
        raise OptionError(
            f"What a {family} model caches cannot be known from its config, since it does not run "
            f"without data: {reason}."
        ) from error
    text = model.config.get_text_config(decoder=True)
    layers, states = {}, 0
    for number, layer in enumerate(cache.layers):
        _check_understood(layer, family)
        states += sum(t.nbytes for t in _states(layer))
        if isinstance(getattr(layer, "keys", None), Tensor):
            layers[number] = _layer_shape(layer, text)
    if not layers:
        raise OptionError(f"A {family} model keeps no keys and values: there is nothing to pack.")
    matrices, experts, share = _weights(model, text)
    return ModelShape(
        layers=layers,
        state_bytes=states,
        query_heads=getattr(text, "num_attention_heads", 0),
        weights=sum(int(p.nbytes) for p in model.parameters()),
        matrices=matrices,
        experts=experts,
        share=share,
        itemsize=dtype.itemsize,
    )


def _on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The model without weights; a decoder without a head where there is no causal one."""
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
    kind = next((k for k in kinds if type(config) in k._model_mapping), AutoModel)
    with torch.device("meta"):
        model = kind.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation="eager"
        ).eval()
    # Others ask which experts were chosen.
    model.set_experts_implementation("batched_mm")
    return model


def _states(layer: Any) -> Iterator[Tensor]:
    """The constant states of a layer that has such."""
    for name in ("conv_states", "recurrent_states"):
        states: Mapping[int, Tensor | None] = getattr(layer, name, None) or {}
        yield from (state for state in states.values() if state is not None)


def _check_understood(layer: Any, family: str) -> None:
    """Refuses a layer with tensors whose growth is not known.

    Raises:
        OptionError: if it has such.
    """
    found = {name for name, t in vars(layer).items() if isinstance(t, Tensor) and t.dim()}
    if more := sorted(found - {"keys", "values"}):
        raise OptionError(
            f"The cache of a {family} model has layers ({type(layer).__name__}) that are not "
            f"understood: beside keys and values they hold {', '.join(more)}."
        )


def _layer_shape(layer: Any, text: Any) -> LayerShape:
    (_, heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[3]
    window = getattr(layer, "sliding_window", None)
    latents = getattr(text, "kv_lora_rank", None) == key_dim
    return LayerShape(
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        # As transformers' layers do: with a new token that is the window.
        window=None if window is None else window - 1,
        latents=latents,
        rope=0 if latents else _rotated(text, key_dim),
    )


def _rotated(text: Any, dim: int) -> int:
    """The channels of a head that a rotary embedding rotates."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        return 0
    kinds = [x for x in parameters.values() if isinstance(x, Mapping)] or [parameters]
    return int(dim * max(float(x.get("partial_rotary_factor") or 1) for x in kinds)) // 2 * 2


def _weights(model: nn.Module, text: Any) -> tuple[int, int, float]:
    """Elements of matrices, elements of experts, and the share of these that a token takes."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    skipped = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    skipped -= {id(p) for p in (head.parameters() if head is not None else ())}
    matrices, experts, counts = 0, 0, set()
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() == 3:
            experts += parameter.numel()
            counts.add(parameter.shape[0])
        elif id(parameter) not in skipped:
            matrices += parameter.numel()
    chosen = getattr(text, "num_experts_per_tok", None)
    share = min(1.0, chosen / max(counts)) if chosen and counts else 1.0
    return matrices, experts, share
