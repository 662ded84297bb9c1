"""Model shapes to measure: a transformers config, from numbers or a file, and random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicLayer

from kvpass.errors import OptionError, check_whole, unknown
from kvpass.written import written

_POSITIONS = 1 << 20


def check_sizes(**sizes: int | None) -> None:
    """Refuses sizes below 1, and KV heads that do not divide the query heads; None is no size.

    Raises:
        OptionError: if there are such.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} is not supported; at least 1.")
    if (sizes.get("heads") or 0) % (sizes.get("kv_heads") or 1):
        raise OptionError(
            f"{sizes['kv_heads']} KV heads do not divide {sizes['heads']} query heads."
        )


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. ``head_dim`` None: ``hidden / heads``.

    Raises:
        OptionError: if a number is not positive or does not divide as it must.
    """

    layers: int = 12
    hidden: int = 1024
    intermediate: int = 2816
    heads: int = 16
    kv_heads: int = 4
    head_dim: int | None = None
    vocab: int = 32000

    def __post_init__(self) -> None:
        check_sizes(**vars(self))
        if self.head_dim is None and self.hidden % self.heads:
            raise OptionError(f"{self.heads} heads do not divide hidden size {self.hidden}.")

    def config(self) -> LlamaConfig:
        """The transformers config of such a model."""
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            max_position_embeddings=_POSITIONS,
        )


PRESETS = {
    "small": Shape(),
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 128, 32000),
    "llama-2-13b": Shape(40, 5120, 13824, 40, 40, 128, 32000),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": Shape(80, 8192, 28672, 64, 8, 128, 128256),
}


@dataclass(frozen=True)
class CacheShape:
    """The cache of a model: ``layers`` times keys and values ``[B, kv_heads, T, head_dim]``."""

    layers: int
    kv_heads: int
    head_dim: int

    def plain_bytes(self, batch: int, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of all of it where it is not packed."""
        elements = batch * self.kv_heads * tokens * self.head_dim
        return self.layers * 2 * elements * dtype.itemsize


def written_config(text: str) -> Any:
    """The transformers config that a command line names: a folder of a model, its
    ``config.json``, or a preset, also with sizes: ``small,layers=2``.

    Raises:
        OptionError: if there is no such file or preset, or a size is not possible.
    """
    if Path(text).is_dir():
        return load_config(str(Path(text) / "config.json"))
    if text.endswith(".json"):
        return load_config(text)
    name, sizes = written(text, "Model", "small,layers=2")
    return preset(name, sizes).config()


def preset(name: str, sizes: Mapping[str, Any]) -> Shape:
    """The shape of that name, with some sizes replaced.

    Raises:
        OptionError: if the name or a size is not known, or a size is not possible.
    """
    if name not in PRESETS:
        raise OptionError(unknown("preset or model folder", name, PRESETS))
    known = [field.name for field in fields(Shape)]
    for size, value in sizes.items():
        if size not in known:
            raise OptionError(unknown("size of a preset:", size, known))
        check_whole(size, value, 1)
    shape = PRESETS[name]
    if "head_dim" not in sizes and {"hidden", "heads"} & set(sizes):
        # The preset's own head dimension belongs to its own sizes.
        shape = replace(shape, head_dim=None)
    return replace(shape, **sizes)


def load_config(path: str) -> Any:
    """The transformers config in a JSON file, e.g. a model's ``config.json``.

    Raises:
        OptionError: if the file is missing or is no config.
    """
    try:
        content = json.loads(Path(path).read_text())
        return AutoConfig.for_model(content.pop("model_type"), **content)
    except FileNotFoundError:
        raise OptionError(f"Config file '{path}' does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise OptionError(f"'{path}' is not a transformers config: {reason}.") from None


def cache_shape(config: Any) -> CacheShape:
    """Sizes of the cache of such a model.

    Raises:
        OptionError: if not every layer keeps all tokens.
    """
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer}
    if kinds:
        raise OptionError(
            "The model's cache has layers that do not keep all tokens "
            f"({', '.join(sorted(kind.__name__ for kind in kinds))}); "
            "the benchmarks take models with full attention in every layer."
        )
    return layer_sizes(config)


def layer_sizes(config: Any) -> CacheShape:
    """The sizes in a config, whatever its layers keep."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return CacheShape(text.num_hidden_layers, kv_heads, dim)


def model_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights, none of which are made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(int(p.nbytes) for p in model.parameters())


def random_model(
    config: Any, dtype: torch.dtype, device: torch.device, attention: str = "sdpa"
) -> Any:
    """A causal language model with random weights, in eval mode."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    scale_matrices(model, 4 * math.sqrt(1024 / config.get_text_config(decoder=True).hidden_size))
    return model.to(device).eval()


@torch.no_grad()
def scale_matrices(model: torch.nn.Module, scale: float) -> None:
    """Makes the attention of random weights as peaked in every size of model as that of trained
    ones: otherwise it would average the whole cache, and logits would not show a wrong one."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(scale)
