"""``kvpass::linear`` and ``linears`` in C++: linear layers of up to 16 tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvpass._torch import is_subclass
from kvpass._torch_cpp import empty_cpu, multiplies_bfloat16
from kvpass._torch_sizes import constant
from lowering.cpp.constants import unsupported_device
from lowering.cpp.library import (
    load_function,
    native_lanes,
    native_tiles,
    source,
    unsupported_compiler,
)
from lowering.cpp.structs import LINEAR, LINEAR_LAYER, linear_struct

# Of more tokens torch's own layers take less time; of bfloat16 stored by inputs, too, where the
# processor has instructions that the kernel has not.
_MOST_TOKENS = 16
_MOST_TRANSPOSED = 4
# Bytes that a thread has to read: starting one takes as long.
_BYTES_PER_THREAD = 2**16


def most_tokens(dtype: torch.dtype, transposed: bool = False) -> int:
    """The most tokens of this dtype that the kernel takes, by how weights are stored."""
    left = transposed and dtype == torch.bfloat16 and multiplies_bfloat16()
    return _MOST_TRANSPOSED if left else _MOST_TOKENS


@cache
def _source(tokens: int, dtype: torch.dtype, scaled: bool, transposed: bool) -> str:
    weight = f"using LinearWeight = {'int8_t' if scaled else 'Scalar'};"
    more = "using Element = Scalar", "using Weight = LinearWeight", "LinearLayer layers[]"
    structs = (
        LINEAR_LAYER.declaration(),
        LINEAR.declaration(*more, TOKENS=tokens, TRANSPOSED=transposed),
    )
    machine = {"lanes": native_lanes(), "tiles": native_tiles()}
    return source(["linear.h"], ["linear"], [weight, *structs], dtype=dtype, **machine)


@cache
def _function(
    tokens: int, dtype: torch.dtype, scaled: bool, transposed: bool, layers: int
) -> tuple[Callable[[bytes], Any], Callable[..., bytes]]:
    """The compiled function, and what packs its arguments for so many layers."""
    function = load_function("linear", _source(tokens, dtype, scaled, transposed))
    return function, linear_struct(layers).pack


def _is_transposed(weight: Tensor) -> bool:
    """Whether a row in memory has the numbers of an input, as in GPT-2."""
    return not weight.is_contiguous() and weight.t().is_contiguous()


def unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::linear``, or None."""
    plain = [t for t in (x, bias, weight if scale is None else None) if t is not None]
    if any(map(is_subclass, plain)):
        return f"the weight is {type(weight).__name__}"
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions"
    transposed = scale is None and _is_transposed(weight)
    tokens = constant(math.prod(x.shape[:-1]))
    most = most_tokens(x.dtype, transposed)
    if tokens is None or not 0 < tokens <= most:
        return f"it has {tokens or 'any number of'} tokens; C++ takes 1 to {most}"
    if len({t.dtype for t in plain}) > 1:
        return "the weight, or the bias, is of another dtype than the tokens"
    rows = weight.t() if transposed else weight
    if not all(t.is_contiguous() for t in (rows, bias, scale) if t is not None):
        return "the weight, or what comes with it, is not contiguous"
    if scale is not None and (scale.dtype, weight.dtype) != (torch.float32, torch.int8):
        return f"the weight is {weight.dtype} with scales in {scale.dtype}; C++ takes int8, float32"
    return unsupported_device(x) or unsupported_compiler(
        "linear", _source(tokens, x.dtype, scale is not None, transposed)
    )


def unsupported_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> str | None:
    """Why C++ declines these arguments of ``kvpass::linears``, or None."""
    layers = list(zip(weights, biases, scales, strict=True))
    if reason := next(filter(None, (unsupported_reason(x, *layer) for layer in layers)), None):
        return reason
    if len({scale is None for scale in scales}) > 1:
        return "some weights have scales, and others have not"
    if any(map(_is_transposed, weights)):
        return "weights that are stored by inputs are as fast one by one"
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """As `kvpass.ops.linear.linear`, for arguments that are supported."""
    return linears(x, (weight,), (bias,), (scale,))[0]


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[Tensor]:
    """As `kvpass.ops.linear.linears`, for arguments that are supported."""
    x = x.contiguous()
    *lead, inputs = x.shape
    dtype, count, size = x.dtype, len(weights), 0
    made = [empty_cpu((*lead, weight.shape[0]), dtype) for weight in weights]
    layers: list[int] = []
    for weight, bias, scale, out in zip(weights, biases, scales, made, strict=True):
        size += weight.nbytes
        layers += (
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if scale is None else scale.data_ptr(),
            out.data_ptr(),
            weight.shape[0],
        )
    kind = dtype, scales[0] is not None, _is_transposed(weights[0])
    function, pack = _function(math.prod(lead), *kind, count)
    threads = min(torch.get_num_threads(), 1 + size // _BYTES_PER_THREAD)
    function(pack(x.data_ptr(), inputs, threads, count, *layers))
    return made
