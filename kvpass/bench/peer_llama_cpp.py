"""llama.cpp as a peer of ``kvpass bench decode``: the model as a GGUF file, and its steps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpass.bench.filling import Setting
from kvpass.errors import OptionError

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# What a saved state begins with: a mark, flags and the number of streams.
_BEGIN = 12
# Channels of the smallest Hadamard matrix that llama.cpp puts quantized caches behind.
_LEAST_BLOCK = 64


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


class Runtime:
    """The model, with a cache.

    Args:
        path: of the GGUF file.
        setting: the task.
        cache: the type of keys and values. All but a plain ``f16`` need flash attention.
        room: tokens that the cache can hold.
    """

    def __init__(self, path: Path, setting: Setting, cache: str, room: int) -> None:
        import llama_cpp

        self.vocab = setting.config.vocab_size
        self.kind, self.flash = cache.split(",")[0].upper(), cache != "f16"
        self.type = getattr(llama_cpp, f"GGML_TYPE_{self.kind}")
        threads = torch.get_num_threads()
        self.runtime = llama_cpp.Llama(
            str(path), n_ctx=room, n_threads=threads, n_threads_batch=threads, verbose=False,
            type_k=self.type, type_v=self.type, flash_attn=self.flash,
        )  # fmt: skip

    def decode(self, ids: Tensor) -> Tensor:
        """Logits ``[1, V]`` of the last of ids ``[1, n]``, which are behind all earlier ones."""
        import llama_cpp
        import numpy

        self.runtime.eval(ids[0].tolist())
        logits = llama_cpp.llama_get_logits_ith(self.runtime.ctx, -1)
        return torch.from_numpy(numpy.ctypeslib.as_array(logits, (1, self.vocab)).copy())

    def fill(self, cache: DynamicCache) -> None:
        """Takes the keys and values of ``cache``, by the saved state that holds them.

        Raises:
            OptionError: if this version saves another state.
        """
        import llama_cpp

        ctx = self.runtime.ctx
        # What a state begins with is taken from that of a single token.
        self.runtime.eval([0])
        size = llama_cpp.llama_state_seq_get_size(ctx, 0)
        single = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(ctx, single, size, 0)
        held = stored_state(cache, self.type, self.packed, self.flash, self.kind != "F16")
        state = bytes(single[:_BEGIN]) + b"".join(held)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if llama_cpp.llama_state_seq_set_data(ctx, buffer, len(state), 0) != len(state):
            raise OptionError(f"This version of llama.cpp takes no cache of {self.kind}.")
        self.runtime.n_tokens = cache.get_seq_length()

    def packed(self, rows: Tensor) -> bytes:
        """Rows of float32 in the cache's type."""
        import gguf

        kind = gguf.GGMLQuantizationType[self.kind]
        data: bytes = gguf.quants.quantize(rows.numpy(), kind).tobytes()
        return data


def stored_state(
    cache: DynamicCache, kind: int, packed: Callable[[Tensor], bytes], flash: bool, turned: bool
) -> Iterator[bytes]:
    """The parts of the state that llama.cpp saves of a sequence, behind its first 12 bytes.

    Args:
        cache: of a Llama in transformers, ``[1, H, T, D]`` of each layer.
        kind: ggml's number of the type of keys and values.
        packed: rows of float32 in this type.
        flash: with flash attention; else values are stored by channels.
        turned: keys and values are behind Hadamard matrices, as those of quantized types are.
    """
    tokens, layers = cache.get_seq_length(), cache.layers
    yield struct.pack("<I", tokens)
    # The position of each token, and the one sequence that it is part of.
    yield b"".join(struct.pack("<iIi", i, 1, 0) for i in range(tokens))
    yield struct.pack("<II", not flash, len(layers))
    _, heads, _, dim = layers[0].keys.shape
    for layer in layers:
        keys = interleaved(layer.keys[0].transpose(1, 2).flatten(0, 1), heads).T.float()
        data = packed((behind_hadamard(keys, dim, dim) if turned else keys).contiguous())
        yield struct.pack("<iQ", kind, len(data) // tokens) + data
    for layer in layers:
        values = layer.values[0].transpose(0, 1).flatten(1).float()
        if flash:
            data = packed(behind_hadamard(values, dim, _LEAST_BLOCK) if turned else values)
            yield struct.pack("<iQ", kind, len(data) // tokens) + data
        else:
            data = packed(values.T.contiguous())
            yield struct.pack("<iII", kind, len(data) // values.numel(), values.shape[1]) + data


def behind_hadamard(x: Tensor, dim: int, most: int) -> Tensor:
    """Channels ``[T, H * D]`` behind Sylvester's matrices of as many channels as divide a head of
    ``dim``, at most so many; heads that 64 does not divide as they are."""
    block = min(dim & -dim, most)
    if block < _LEAST_BLOCK:
        return x
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    matrix = reduce(torch.kron, [pair] * (block.bit_length() - 1))
    turned: Tensor = x.unflatten(1, (-1, block)) @ matrix
    return turned.flatten(1)
