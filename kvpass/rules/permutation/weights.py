"""Permutations of channels end in the weights of linear layers."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from kvpass.graph.orders import flat, inverse
from kvpass.graph.pattern import Miss
from kvpass.graph.spellings import argument, op_name
from kvpass.rules.permutation.base import Moved, folded, replace_argument, shape_of, weight_miss

# The arguments of each kind of linear layer, and its weight's dimension of the output's channels.
_LAYERS = {"linear": ("input", "weight", "bias", 0), "addmm": ("mat1", "mat2", "input", 1)}


# P(x @ W.T + b)   = x @ P(W).T + P(b),         P on the rows of W:       linear
# P(x @ W + b)     = x @ P(W) + P(b),           P on the columns of W:    addmm
# P(x) @ W.T + b   = x @ (P^-1(W)).T + b,       P^-1 on the columns of W: linear
# P(x) @ W + b     = x @ P^-1(W) + b,           P^-1 on the rows of W:    addmm
def linear_up(x: Node, index: Tensor) -> Moved:
    """Moves into the weight and the bias of the layer that computes the channels."""
    if op_name(x) not in _LAYERS:
        return None
    _, weight_name, bias_name, dim = _LAYERS[op_name(x)]
    order, weight, bias = flat(index), argument(x, weight_name), argument(x, bias_name)
    if order is None:
        return Miss("the order is not one of the layer's channels", x)
    if miss := weight_miss(weight, dim) or (None if bias is None else weight_miss(bias, 0)):
        return miss
    if bias is not None and tuple(shape_of(bias)) != tuple(order.shape):
        return Miss("the bias is no vector", bias)
    replace_argument(x, weight_name, weight, folded(weight, order, dim))
    if bias is not None:
        replace_argument(x, bias_name, bias, folded(bias, order))
    return []


def linear_down(reader: Node, permute: Node, index: Tensor) -> Moved:
    """Moves into the weight of the layer that reads the channels."""
    if op_name(reader) not in _LAYERS:
        return None
    input_name, weight_name, _, dim = _LAYERS[op_name(reader)]
    order, weight = flat(index), argument(reader, weight_name)
    if argument(reader, input_name) is not permute:
        return Miss("it is read as a weight", reader)
    if order is None:
        return Miss("the order is not one of the layer's channels", reader)
    if miss := weight_miss(weight, 1 - dim):
        return miss
    replace_argument(reader, weight_name, weight, folded(weight, inverse(order), 1 - dim))
    reader.replace_input_with(permute, permute.all_input_nodes[0])
    return []
