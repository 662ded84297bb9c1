"""The parts of a tiny config: sizes by the names of fields, and exceptions by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCABULARY = 128
SLIDING_WINDOW = 40
POSITIONS = 512

_FIELDS = {
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size "
    "shape_vocab_size pronunciation_vocab_size",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim input_embedding_size "
    "output_embedding_size lru_width router_hidden_size emb_dim embedding_dim moe_hidden_size",
    96: "intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner "
    "ffn_hidden_size dff dim_ff d_inner moe_intermediate_size expert_ffn_hidden_size "
    "shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size feed_forward_size "
    "prefix_dense_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
    "swa_num_attention_heads num_query_groups num_attention_heads_per_layer num_experts "
    "n_routed_experts num_local_experts moe_num_experts linear_num_value_heads index_n_heads "
    "linear_num_heads zero_expert_num",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads linear_num_key_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts "
    "encoder_layers num_encoder_layers o_groups",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts n_groups "
    "moe_num_shared_experts mamba_n_groups mamba_ngroups",
    16: "head_dim swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels "
    "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim d_head dim_head "
    "attention_head_size mamba_d_state mamba_d_head ssm_state_size state_size mamba_head_dim "
    "mamba_headdim hidden_size_per_layer_input chunk_size mamba_chunk_size d_rel",
    32: "kv_lora_rank q_lora_rank o_lora_rank qk_head_dim gated_norm_rank adapter_rank hc_lowrank",
    8: "mamba_n_heads mamba_num_heads n_mamba_heads time_step_rank mamba_dt_rank laurel_rank "
    "rotary_dim",
    POSITIONS: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions "
    "max_source_positions model_max_length context_length seq_length rel_extent index_topk",
    SLIDING_WINDOW: "sliding_window window_size attention_window_size local_attention "
    "attention_chunk_size sliding_window_size",
}
SIZES = {name: size for size, names in _FIELDS.items() for name in names.split()}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
          "num_decoder_layers")  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_TWO_ROPES = dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)
_LLAMA4_ROPE = {**_ROPE, "llama_4_scaling_beta": 0.1, "max_position_embeddings": POSITIONS,
                "original_max_position_embeddings": SLIDING_WINDOW}  # fmt: skip
# Where fields by name are not enough, each with the reason.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # Published models have a sliding window, the default config has none.
    **{family: {"sliding_window": SLIDING_WINDOW}
       for family in ("phi3", "phimoe", "starcoder2", "mixtral")},
    # Kinds of layers that the default config writes in other ways than one list.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dory": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
             "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1],
             "num_hidden_layers": 2},
    # Layers that share the keys and values of earlier ones, as in published models.
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
    },
    # The shared block is that of the first hybrid layer; two show it.
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
              "attention_head_dim": 32, "attention_hidden_size": 128},
    # Sizes that the default config leaves out.
    **{family: {"head_dim": 16} for family in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _MROPE},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "cohere_compass_text": {"layer_types": list(_TWO_ROPES), "rope_parameters": _TWO_ROPES},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                       "indexer_budget": 32, "indexer_compress_ratio": 4},
    "xmod": {"default_language": "en_XX"},
    "chameleon": {"vocabulary_map": {"<image>": 127, "IMGIMGAZ": 126}},
    # Sections of the position encoding that the default config leaves out.
    **{family: {"rope_parameters": _MROPE}
       for family in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text")},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 2, 1],
                                           "partial_rotary_factor": 0.5}},
    # Queries are scaled by position from the original length on.
    "ministral3": {"rope_parameters": _LLAMA4_ROPE},
    "mistral4": {"rope_parameters": {**_LLAMA4_ROPE, "partial_rotary_factor": 0.5}},
    # Sizes that must agree.
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    "dots3_note_text": {"head_dim": 40, "per_layer_config": {"2": {
        "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
    }}},
    # One code book, so that a step takes one token.
    **{family: {"num_codebooks": 1} for family in ("musicgen_decoder", "musicgen_melody_decoder")},
}  # fmt: skip

# Model types of the same mappings that cannot be run as a decoder of token ids, with the reason.
NOT_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "openai-gpt", "reformer", "rwkv", "xlm", "xlnet",
         "xlstm"),
        "it keeps no keys and values in a cache",
    ),
    **dict.fromkeys(("idefics", "pi0", "udop"), "it takes more than token ids"),
    "blt": "its cache cannot be made from its config",
    "cpmant": "it takes the whole text in every step",
    "recurrent_gemma": "it keeps its cache in its modules",
}  # fmt: skip
