"""Bases of channels end in the weights of linear layers."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from kvpass.graph.bases import channels, flat, inverse
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.rules.basis.base import Moved, folded, replace_argument, shape_of, weight_miss

# The arguments of each kind of linear layer, and its weight's dimension of the output's channels.
LAYERS = {"linear": ("input", "weight", "bias", 0), "addmm": ("mat1", "mat2", "input", 1)}


# R(x @ W.T + b)   = x @ R(W).T + R(b),         R on the rows of W:       linear
# R(x @ W + b)     = x @ R(W) + R(b),           R on the columns of W:    addmm
# R(x) @ W.T + b   = x @ (R^-1(W)).T + b,       R^-1 on the columns of W: linear
# R(x) @ W + b     = x @ R^-1(W) + b,           R^-1 on the rows of W:    addmm
def linear_up(x: Node, basis: Tensor) -> Moved:
    """Moves into the weight and the bias of the layer that computes the channels."""
    if op_name(x) not in LAYERS:
        return None
    _, weight_name, bias_name, dim = LAYERS[op_name(x)]
    own, weight, bias = flat(basis), argument(x, weight_name), argument(x, bias_name)
    if own is None:
        return Miss("the basis is not one of the layer's channels", x)
    if miss := weight_miss(weight, dim) or (None if bias is None else weight_miss(bias, 0)):
        return miss
    if bias is not None and tuple(shape_of(bias)) != (channels(own),):
        return Miss("the bias is no vector", bias)
    replace_argument(x, weight_name, weight, folded(weight, own, dim))
    if bias is not None:
        replace_argument(x, bias_name, bias, folded(bias, own))
    return []


def linear_down(reader: Node, rotate: Node, basis: Tensor) -> Moved:
    """Moves into the weight of the layer that reads the channels."""
    if op_name(reader) not in LAYERS:
        return None
    input_name, weight_name, _, dim = LAYERS[op_name(reader)]
    own, weight = flat(basis), argument(reader, weight_name)
    if argument(reader, input_name) is not rotate:
        return Miss("it is read as a weight", reader)
    if own is None:
        return Miss("the basis is not one of the layer's channels", reader)
    if miss := weight_miss(weight, 1 - dim):
        return miss
    replace_argument(reader, weight_name, weight, folded(weight, inverse(own), 1 - dim))
    reader.replace_input_with(rotate, rotate.all_input_nodes[0])
    return []
