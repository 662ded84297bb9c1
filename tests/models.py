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
# DeepSeek's multi-head latent attention: "keys" are latents, "values" rotary keys.
_MLA = {
    **_GQA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": _GQA,
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 16},
    "gemma": {**_GQA, "head_dim": 16},
    "gpt_neox": {**_MHA, "rotary_pct": 0.5},
    "opt": {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {**_MHA, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
    # Sliding windows, longer than the exact ones of the tests' recipes.
    "mistral": {**_GQA, "sliding_window": 40},
    "gemma3_text": {
        **_GQA,
        "head_dim": 16,
        "sliding_window": 40,
        "query_pre_attn_scalar": 16,
    },
}
# Families whose attention is written out, in another way each.
EAGER: dict[str, dict[str, object]] = {
    "gemma2": {**_GQA, "head_dim": 16, "layer_types": ["full_attention"]},
    "gpt_oss": {**_GQA, "head_dim": 16, "layer_types": ["full_attention"]},
    "granite_swa": {**_GQA, "layer_types": ["full_attention"]},
    "bloom": _MHA,
    "mpt": {**_MHA, "n_layers": 1, "d_model": 64, "n_heads": 4},
    "xglm": {**_MHA, "d_model": 64, "attention_heads": 4, "num_layers": 1, "ffn_dim": 64},
    "gptj": {**_MHA, "rotary_dim": 8},
    "gpt_neo": {**_MHA, "num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
    "codegen": {**_MHA, "n_layer": 1, "n_embd": 64, "n_head": 4, "rotary_dim": 8},
    "gpt_neox_japanese": _MHA,
}
# Families that decode the cache in every step.
DECODED: dict[str, dict[str, object]] = {
    "deepseek_v2": _MLA,
    "doge": _GQA,
    "diffllama": _GQA,
}
# Families that compute keys in another way each.
PROJECTED: dict[str, dict[str, object]] = {
    "phi": {**_GQA, "partial_rotary_factor": 0.5},
    "phi3": _GQA,
    "glm4": {**_GQA, "head_dim": 16, "partial_rotary_factor": 0.5},
    "gpt2": {**_MHA, "n_embd": 64, "n_head": 4, "n_inner": 96},
    "cohere": _GQA,
    "olmo2": _GQA,
    "hunyuan_v1_dense": {**_GQA, "head_dim": 16},
}


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
    options = {
        **(FAMILIES | EAGER | DECODED | PROJECTED)[family],
        "num_hidden_layers": layers,
        **overrides,
    }
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
