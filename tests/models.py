"""Tiny random models of the families that the rules are proven on."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_GQA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MHA = {k: v for k, v in _GQA.items() if k != "num_key_value_heads"}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": _GQA,
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 16},
    "gemma": {**_GQA, "head_dim": 16},
    "gpt_neox": {**_MHA, "rotary_pct": 0.5},
    "opt": {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {**_MHA, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
}
# Families that are refused: every layer keeps a sliding window.
REFUSED = {"mistral": {**_GQA, "sliding_window": 16}}


def tiny_model(
    family: str = "llama",
    *,
    attention: str = "sdpa",
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: object,
) -> PreTrainedModel:
    """A random model in eval mode. Weights are large enough for attention to be peaked."""
    options = {**(FAMILIES | REFUSED)[family], "num_hidden_layers": layers, **overrides}
    config = AutoConfig.for_model(family, attn_implementation=attention, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model.to(dtype).eval()


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[batch, length]``, no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, length), generator=generator)
