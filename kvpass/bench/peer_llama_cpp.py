"""llama.cpp as a peer of ``kvpass bench decode``: the model as a GGUF file, and its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpass.bench.filling import Setting
from kvpass.errors import OptionError

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def interleaved(x: Tensor, heads: int) -> Tensor:
    """The rows of a query or key projection in llama.cpp's order.

    transformers' RoPE turns channel ``i`` of a head with channel ``i + D / 2``, that of llama.cpp
    turns neighbours: channels ``0, D / 2, 1, D / 2 + 1, ...`` become ``0, 1, 2, 3, ...``.

    Args:
        x: a weight ``[heads * D, hidden]`` or a bias ``[heads * D]``.
        heads: query heads, or KV heads for keys.
    """
    return x.reshape(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def write_model(setting: Setting, model: Any, folder: Path) -> Path:
    """Writes the GGUF file of a Llama in the setting's dtype; norms are float32, as llama.cpp asks.

    Raises:
        OptionError: if its RoPE is not the plain one.
    """
    import gguf

    config = setting.config
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        kind = rope["rope_type"]
        raise OptionError(f"llama.cpp is measured with rope_type='default' only, not '{kind}'.")
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(setting.shape.layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(setting.shape.kv_heads)
    writer.add_key_length(setting.shape.head_dim)
    writer.add_value_length(setting.shape.head_dim)
    writer.add_rope_dimension_count(setting.shape.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    # Tokens are given by their ids.
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, setting.shape.layers)
    for name, x in model.state_dict().items():
        stored = stored_tensor(name, x, config.num_attention_heads, setting.shape.kv_heads)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            stored.view(torch.uint8).numpy(),
            raw_dtype=getattr(gguf.GGMLQuantizationType, _TYPES[stored.dtype]),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_tensor(name: str, x: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The parameter of that name in transformers, as the file has it."""
    if ".q_proj." in name:
        x = interleaved(x, heads)
    if ".k_proj." in name:
        x = interleaved(x, kv_heads)
    return (x.float() if x.dim() == 1 else x).contiguous()


def start(path: Path, setting: Setting, cache: str, room: int) -> Callable[[Tensor], Tensor]:
    """Loads the model; what decodes ids ``[1, n]`` behind all earlier ones, to logits ``[1, V]``.

    Args:
        path: of the GGUF file.
        setting: the task.
        cache: the type of keys and values. All but a plain ``f16`` need flash attention.
        room: tokens that the cache can hold.
    """
    import llama_cpp
    import numpy

    kind = getattr(llama_cpp, f"GGML_TYPE_{cache.split(',')[0].upper()}")
    threads = torch.get_num_threads()
    runtime = llama_cpp.Llama(
        str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False,
        type_k=kind, type_v=kind, flash_attn=cache != "f16",
    )  # fmt: skip

    def decode(ids: Tensor) -> Tensor:
        runtime.eval(ids[0].tolist())
        logits = llama_cpp.llama_get_logits_ith(runtime.ctx, -1)
        shape = (1, setting.config.vocab_size)
        return torch.from_numpy(numpy.ctypeslib.as_array(logits, shape).copy())

    return decode
