"""OpenVINO as a peer of ``kvpass bench decode``: the model as a stateful IR, and its steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpass.bench.filling import Setting, step
from kvpass.errors import OptionError
from kvpass.format.dtypes import dtype_name

_PRECISIONS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Tokens of the past and of the step while the model is traced; the IR takes any number.
_TRACED = 3


class Stateless(torch.nn.Module):
    """The model with keys and values as inputs and outputs.

    They pass an index of sequences, as beam search has it: without one OpenVINO's CPU plugin does
    not recognize caches, and computes attention op by op in the model's own precision.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, beams: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Logits ``[1, V]`` of the last token, and all keys and values."""
        cache = DynamicCache(config=self.model.config)
        held = [x.index_select(0, beams) for x in past]
        for layer, keys, values in zip(cache.layers, held[::2], held[1::2], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        logits = step(self.model, ids, cache)
        return logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))


def write_model(setting: Setting, model: Any, folder: Path) -> Path:
    """Writes the IR, whose states are keys and values ``[1, H, T, D]`` and begin empty.

    Its weights have the setting's precision and are stored in float32: the CPU plugin rounds them
    back, and keeps in float32 what may not be rounded, such as RoPE's angles.
    """
    import numpy
    import openvino
    from openvino.passes import MakeStateful, Manager

    shape = setting.shape
    past = [torch.zeros(1, shape.kv_heads, _TRACED, shape.head_dim)] * (2 * shape.layers)
    example = setting.ids(_TRACED), torch.zeros(1, dtype=torch.int32), *past
    traced = Stateless(copy.deepcopy(model).float()).eval()
    ir = openvino.convert_model(traced, example_input=example)
    names = ["ids", "beams", *(f"past.{i}" for i in range(len(past)))]
    sizes = [[1, -1], [1], *([1, shape.kv_heads, -1, shape.head_dim] for _ in past)]
    for port, name, size in zip(ir.inputs, names, sizes, strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(size))
    states = {name: f"new {name}" for name in names[2:]}
    for port, name in zip(ir.outputs[1:], states.values(), strict=True):
        port.get_tensor().set_names({name})
    ir.validate_nodes_and_infer_types()
    passes = Manager()
    passes.register_pass(MakeStateful(states))
    passes.run_passes(ir)
    empty = numpy.zeros((1, shape.kv_heads, 0, shape.head_dim), numpy.float32)
    for node in ir.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([openvino.op.Constant(empty)])
    ir.validate_nodes_and_infer_types()
    path = folder / "model.xml"
    openvino.save_model(ir, path, compress_to_fp16=False)
    return path


class Runtime:
    """The model, with a cache in its states.

    Args:
        path: of the IR.
        setting: the task.
        cache: the precision of keys and values.
        room: is not needed: states grow.

    Raises:
        OptionError: if the CPU plugin does not compute in the setting's dtype or does not keep
        such a cache.
    """

    def __init__(self, path: Path, setting: Setting, cache: str, room: int) -> None:
        import numpy
        import openvino

        precision = _PRECISIONS[setting.dtype]
        wanted = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache}
        threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = openvino.Core().compile_model(path, "CPU", wanted | threads)
        used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if used != precision:
            raise OptionError(
                f"OpenVINO computes in {used} here, not in {dtype_name(setting.dtype)}."
            )
        # Attention that was not recognized is computed by other ops, from states that are not
        # packed.
        ops = compiled.get_runtime_model().get_ops()
        kinds = [op.get_rt_info()["layerType"].astype(str) for op in ops]
        if kinds.count("ScaledDotProductAttention") != setting.shape.layers:
            raise OptionError(f"OpenVINO does not keep this model's cache in {cache}.")
        self.cache = cache
        self.request = compiled.create_infer_request()
        self.beams = numpy.zeros(1, numpy.int32)

    def decode(self, ids: Tensor) -> Tensor:
        """Logits ``[1, V]`` of the last of ids ``[1, n]``, which are behind all earlier ones."""
        logits = self.request.infer({"ids": ids.numpy(), "beams": self.beams})[0]
        return torch.from_numpy(logits)

    def fill(self, cache: DynamicCache) -> None:
        """Takes the keys and values of ``cache`` as its states.

        Raises:
            OptionError: if the cache has 4 bits: the plugin crashes (2026.4).
        """
        import openvino

        if self.cache == "u4":
            raise OptionError("OpenVINO takes no cache of u4, it can compute one: --fill prompt.")
        past = [x for layer in cache.layers for x in (layer.keys, layer.values)]
        for state in self.request.query_state():
            x = past[_index(state.name)].float().contiguous()
            state.state = openvino.Tensor(x.numpy(), x.shape)


def _index(name: str) -> int:
    """The number of a state of `write_model`: ``past.7new past.7`` is 7."""
    return int(name.rpartition(".")[2])
